"""Runs that begin with the weights of a committed round of another run: `[fork]` in the spec. Pure.

The spec names the round's manifest by its hash, and the manifest has the digest of every layer. The node that writes
genesis sends that manifest with it, so it cannot put other weights in their place. (`runs/forks.py` is about another
kind of fork: two results of one round.)

Checkpoints stay on disk when a node moves to another run. Each node reports those of its former runs with the first
message of a stream, so the coordinator knows who can write genesis; it need not store that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atoll.coordinator.rounds.round_checks import layer_count, layer_shape
from atoll.coordinator.runs.checkpoints import MAX_CHECKPOINTS, checked_row
from atoll.coordinator.state import lookup
from atoll.coordinator.state.known_nodes import known_nodes
from atoll.coordinator.state.run_memory import RunMemory, is_void
from atoll.coordinator.state.snapshot import LiveNode, State
from atoll.coordinator.store.records import Checkpoint, Node, Round, Run
from atoll.core.errors import InvalidRequest, InvalidTransition, NotFound, RunSpecError
from atoll.core.run_spec import ForkSection, RunSpec
from atoll.v1 import membership_pb2 as mb

_NAMED = 8  # rounds or nodes named in one sentence
_LOOK = "see `atollctl checkpoint list`"


@dataclass(frozen=True)
class ForkSource:
    """A round with which a fork can begin, and the checkpoints that have all its layers."""

    run: Run
    round: int
    manifest_hash: bytes
    committed: bool  # whether the coordinator knows that it committed
    held: tuple[Checkpoint, ...]  # by node name


# --- the source that an operator names ---------------------------------------------------------------


def find(state: State, run_id: str, round_number: int, wanted: bytes = b"", *, logged: bytes = b"") -> ForkSource:
    """The source of a fork from that round.

    `wanted`: the hash of its manifest, if the operator names one. `logged`: the hash in the log of rounds, for a round
    that is too old for the state. Raises `NotFound`, `Ambiguous`, `InvalidRequest`, `InvalidTransition`.
    """
    run = lookup.run(state, run_id)
    which = f"round {round_number} of run {run.run_id!r}"
    commit = state.memory[run.run_id].committed.get(round_number)
    known = commit.manifest_hash if commit is not None else logged
    if wanted and known and wanted != known:
        raise InvalidRequest(
            f"{which} committed with manifest {known.hex()}, not {wanted.hex()}", "leave the manifest out, or name this"
        )
    reported = [item for item in reported_checkpoints(state, run.run_id) if item.round == round_number]
    chosen = wanted or known
    if reported and not chosen:
        hashes = ", ".join(sorted({item.manifest_hash.hex() for item in reported})[:3])
        raise NotFound(
            f"{which} is not known to have committed; nodes hold it with manifest {hashes}",
            "check that several nodes hold the same one, then name it with --manifest: it could be forged",
        )
    held = [item for item in reported if item.manifest_hash == chosen]
    if not held:
        raise NotFound(f"no node holds a checkpoint of {which}; {_rounds_held(state, run.run_id)}", _LOOK)
    whole = tuple(item for item in held if has_all_layers(run, item))
    if not whole:
        spans = ", ".join(f"{state.nodes[it.peer_id].name} {it.first_layer}-{it.last_layer}" for it in held[:_NAMED])
        raise InvalidTransition(
            f"no node holds all layers of {which}; there are: {spans}",
            "a fork needs all layers in one checkpoint, and cannot join such parts yet: keep them with "
            "`atollctl checkpoint pull`",
        )
    return ForkSource(run, round_number, chosen, bool(known), whole)


def logged_hash(state: State, run_id: str, rows: Sequence[Round]) -> bytes:
    """The manifest hash of a committed round, from the rows of its attempts; empty if the round is void or unknown."""
    bases = state.memory[run_id].bases
    valid = [it for it in rows if it.committed and not is_void(bases, it.number, it.made_under)]
    return valid[-1].manifest_hash if valid else b""


def check_spec(state: State, spec: RunSpec) -> None:
    """Raise an error unless the fork's source exists and fits: `NotFound`, `RunSpecError`, or an error of `find`."""
    if spec.fork is None:
        return
    fork = spec.fork
    if fork.run not in state.runs:
        raise NotFound(f"there is no run {fork.run!r} to fork from", "see `atollctl run list`")
    source = state.memory[fork.run].spec
    changed = ["[model]"] * (source.model != spec.model)
    changed += ["data.tokenizer"] * (source.data.tokenizer != spec.data.tokenizer)
    if changed:
        raise RunSpecError(
            f"{' and '.join(changed)} must stay as in run {fork.run!r}: the fork has its layers",
            "for another model use `atollctl run clone`, which begins with new weights",
        )
    find(state, fork.run, fork.round, bytes.fromhex(fork.manifest))


def has_all_layers(run: Run, item: Checkpoint) -> bool:
    """True if this checkpoint of the run has every layer of its model."""
    return (item.first_layer, item.last_layer + 1) == (0, layer_count(run.layers))


def reported_checkpoints(state: State, run_id: str) -> list[Checkpoint]:
    """Checkpoints of a run on nodes that are not banned, including nodes that moved to another run; by node name."""
    now_there = (item for held in state.checkpoints.values() for item in held)
    former = (item for live in state.live.values() for item in live.former_checkpoints)
    found = {
        (item.peer_id, item.round): item
        for items in (former, now_there)
        for item in items
        if item.run_id == run_id and item.peer_id in state.nodes and not state.nodes[item.peer_id].banned
    }
    return sorted(found.values(), key=lambda item: (state.nodes[item.peer_id].name, -item.round))


def _rounds_held(state: State, run_id: str) -> str:
    """A sentence that lists the rounds that nodes hold."""
    names: dict[int, list[str]] = {}
    for item in reported_checkpoints(state, run_id):
        names.setdefault(item.round, []).append(state.nodes[item.peer_id].name)
    newest = sorted(names, reverse=True)[:_NAMED]
    listed = "; ".join(f"round {number}: {', '.join(names[number][:_NAMED])}" for number in newest)
    return f"nodes hold {listed}" if listed else "no node reports a checkpoint of this run"


# --- who can write genesis ---------------------------------------------------------------------------


def take_former_checkpoints(live: LiveNode, state: State, node: Node, request: mb.HeartbeatRequest) -> LiveNode:
    """Record a node's reports of checkpoints of its former runs. Ignores runs that are unknown here."""
    if not request.former_checkpoints:
        return live
    found: dict[tuple[str, int], Checkpoint] = {}
    fork = state.memory[node.run_id].spec.fork
    for item in request.former_checkpoints[:MAX_CHECKPOINTS]:
        run = state.runs.get(item.run_id)
        is_source = fork is not None and item.run_id == fork.run  # also if the source run was deleted
        if item.run_id == node.run_id or (run is None and not is_source):
            continue  # perhaps a run of another coordinator
        try:
            count = layer_count(run.layers) if run is not None else 0
            row = checked_row(node.peer_id, item.run_id, item.checkpoint, count)
        except InvalidRequest:
            continue
        found[row.run_id, row.round] = row
    return replace(live, former_checkpoints=tuple(found.values()))


def writers(state: State, run_id: str, ready: list[str]) -> list[str]:
    """The `ready` nodes that may write the run's genesis; in a fork, those that hold its source.

    Nodes on probation may not, unless the run never had others. Nobody can check the weights of an ordinary genesis,
    and the only holder of a fork's source can withhold it.
    """
    return known_nodes(state, _holders(state, run_id, ready))


def missing_writer(state: State, run_id: str, ready: list[str]) -> str:
    """Why none of the `ready` nodes can write the genesis of this run; empty if one can."""
    fork = state.memory[run_id].spec.fork
    if fork is None:
        return ""
    able = writers(state, run_id, ready)
    if not able:
        return _missing_holder(state, run_id, fork, ready)
    source = state.runs.get(fork.run)
    tables = [table for peer in able if (table := state.live[peer].layers)]
    if source is not None and tables and all(layer_shape(table) != layer_shape(source.layers) for table in tables):
        return f"its model has other layers than run {fork.run}: the text of its nodes has another vocabulary"
    return ""


def _missing_holder(state: State, run_id: str, fork: ForkSection, ready: list[str]) -> str:
    strangers = [state.nodes[peer].name for peer in _holders(state, run_id, ready)]
    if strangers:
        return (
            f"only nodes on probation hold the checkpoint of round {fork.round} of run {fork.run} here: "
            f"{', '.join(strangers[:_NAMED])}; move another holder here, or `atollctl node vouch` for one of these"
        )
    return (
        f"needs a node that holds the checkpoint of round {fork.round} of run {fork.run}; "
        f"move one of them here: `atollctl run assign {run_id} NODE`"
    )


def lost_source(state: State, run_id: str) -> str:
    """Why this fork can never begin: a recovery made its source round void, and no node holds it; empty otherwise.

    A node that still holds that round, for example because it moved to another run before, can write the genesis.
    """
    fork = state.memory[run_id].spec.fork
    if fork is None or fork.run not in state.runs or state.runs[run_id].genesis:
        return ""
    if not _is_replaced(state.memory[fork.run], fork) or _is_held(state, fork):
        return ""
    return (
        f"round {fork.round} of run {fork.run}, with which it begins, is void: another round took its place, and none "
        f"of the nodes seen since the coordinator started holds it; start one that does, or stop this run and fork "
        f"from another round ({_LOOK})"
    )


def _is_replaced(memory: RunMemory, fork: ForkSection) -> bool:
    """Whether a recovery made the round void."""
    commit, wanted = memory.committed.get(fork.round), bytes.fromhex(fork.manifest)
    return (commit is not None and commit.manifest_hash != wanted) or wanted in memory.void_manifest_hashes


def _is_held(state: State, fork: ForkSection) -> bool:
    """Whether a node reported a checkpoint of the round with all layers."""
    source, wanted = state.runs[fork.run], bytes.fromhex(fork.manifest)
    return any(
        (item.round, item.manifest_hash) == (fork.round, wanted) and has_all_layers(source, item)
        for item in reported_checkpoints(state, fork.run)
    )


def _holders(state: State, run_id: str, ready: list[str]) -> list[str]:
    fork = state.memory[run_id].spec.fork
    return ready if fork is None else [peer for peer in ready if _holds(state, peer, fork)]


def _holds(state: State, peer_id: str, fork: ForkSection) -> bool:
    source = state.runs.get(fork.run)
    return any(
        (item.run_id, item.round, item.manifest_hash.hex()) == (fork.run, fork.round, fork.manifest)
        and (source is None or has_all_layers(source, item))
        for item in state.live[peer_id].former_checkpoints
    )
