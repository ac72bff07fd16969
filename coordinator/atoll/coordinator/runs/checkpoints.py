"""Which node holds which checkpoint, as the nodes tell it. Pure.

The files stay where they are. Here is what `atollctl checkpoint list` shows, and who is asked when the operator pulls
a round: connected nodes that say they hold it, as few as have all layers. What a node says it holds is a claim; offered
is what is known to have committed, unless the operator asks for anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.coordinator.state import lookup
from atoll.coordinator.state.snapshot import Draft, State, electorate_after
from atoll.coordinator.store.records import Checkpoint, Node
from atoll.core.errors import AtollError, InvalidRequest, NotFound, PeerMisbehaved, Unreachable
from atoll.core.manifest import parse_head, require_quorum, verify_votes
from atoll.core.units import layers_text
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

MAX_CHECKPOINTS = 64  # of one node; the newest ones are kept
MAX_REPORTED_CHECKPOINTS = 4096  # in one message
_MAX = 2**62  # databases keep 63 bits
_DIGEST_BYTES = 32
_LOOK = "see `atollctl checkpoint list`"
_ANOTHER = "name another --node"


def take(draft: Draft, node: Node, request: mb.HeartbeatRequest) -> None:
    """Replace what was known of a node's checkpoints, if it says that they changed. Raises `InvalidRequest`."""
    if not request.checkpoints_changed:
        return
    count = layer_count(draft.state, node.run_id)
    told = sorted(request.checkpoints, key=lambda item: -item.round)[:MAX_CHECKPOINTS]
    if len({item.round for item in told}) != len(told):
        raise InvalidRequest("a node tells its checkpoints, each of another round")
    for item in told:
        numbers = (item.round, item.bytes, item.committed_tokens, abs(item.written_unix_ms))
        if item.layers.first > item.layers.last or (count and item.layers.last >= count):
            raise InvalidRequest("a checkpoint holds layers that cannot be")
        if max(numbers) > _MAX or len(item.manifest_hash) != _DIGEST_BYTES:
            raise InvalidRequest("a checkpoint has a number or a hash that cannot be")
    held = tuple(
        Checkpoint(
            peer_id=node.peer_id,
            round=item.round,
            run_id=node.run_id,
            manifest_hash=item.manifest_hash,
            size_bytes=item.bytes,
            written_ms=item.written_unix_ms,
            committed_tokens=item.committed_tokens,
            first_layer=item.layers.first,
            last_layer=item.layers.last if item.HasField("layers") else max(0, count - 1),
        )
        for item in told
    )
    if held != draft.state.checkpoints.get(node.peer_id, ()):
        draft.set_checkpoints(node.peer_id, held)


def checkpoints_of_run(state: State, run_id: str) -> list[Checkpoint]:
    """All of a run, the newest first, by node name then."""
    found = [item for held in state.checkpoints.values() for item in held if item.run_id == run_id]
    return sorted(found, key=lambda item: (-item.round, state.nodes[item.peer_id].name))


def is_committed(state: State, item: Checkpoint) -> bool:
    """Whether that round is known to have committed with that manifest."""
    commit = state.memory[item.run_id].committed.get(item.round)
    return commit is not None and commit.manifest_hash == item.manifest_hash


def layer_count(state: State, run_id: str) -> int:
    """Of the run's model; 0 before genesis."""
    return len(plan_pb2.LayerTable.FromString(state.runs[run_id].layers).layers)


def choose(
    state: State, run_id: str, round_number: int, node: str, *, unverified: bool = False
) -> tuple[Checkpoint, ...]:
    """Those to pull, together all layers after that round (0: the newest), from connected nodes, in layer order.

    `node` (empty: any) names the only one to ask. `unverified`: also rounds that are not known to have committed, as
    between a backup and its restore. Raises `NotFound`, `Ambiguous`, and `Unreachable` when nodes that are away are
    needed for it.
    """
    run = lookup.run(state, run_id)
    peer_id = lookup.node(state, node).peer_id if node else ""
    told = [
        item
        for item in checkpoints_of_run(state, run.run_id)
        if round_number in (0, item.round) and peer_id in ("", item.peer_id)
    ]
    which = f"of round {round_number} " if round_number else ""
    known = [item for item in told if unverified or is_committed(state, item)]
    if told and not known:
        raise NotFound(
            f"nodes say that they hold a checkpoint {which}that is not known to have committed",
            "tell it from a forged one yourself, by several nodes that hold it, and add --unverified",
        )
    if not known:
        raise NotFound(f"no node of run {run.run_id!r} said that it holds a checkpoint {which}there", _LOOK)
    count = layer_count(state, run.run_id)
    states: dict[tuple[int, bytes], list[Checkpoint]] = {}
    for item in known:
        states.setdefault((item.round, item.manifest_hash), []).append(item)
    for held in states.values():
        if found := fewest_covering([item for item in held if connected(state, item.peer_id)], count):
            return found
    raise _no_checkpoint_error(state, list(states.values()), count)


def fewest_covering(held: Sequence[Checkpoint], count: int) -> tuple[Checkpoint, ...]:
    """As few as have all of `count` layers, in their order; nothing when layers are missing."""
    chosen: list[Checkpoint] = []
    reached = 0
    while reached < count:
        further = [item for item in held if reached in item.layers]
        if not further:
            return ()
        chosen.append(max(further, key=lambda item: item.last_layer))
        reached = chosen[-1].last_layer + 1
    return tuple(chosen)


def _no_checkpoint_error(state: State, states: Sequence[Sequence[Checkpoint]], count: int) -> AtollError:
    """Of the round that lacks the fewest layers, the newest of these."""
    for held in states:
        if any(not connected(state, item.peer_id) for item in fewest_covering(held, count)):
            away = sorted({state.nodes[item.peer_id].name for item in held if not connected(state, item.peer_id)})
            names = ", ".join(away[:5])
            return Unreachable(f"nodes that hold layers of round {held[0].round} are not connected: {names}", _LOOK)
    missing, held = min(
        ((set(range(count)).difference(*(item.layers for item in held)), held) for held in states),
        key=lambda it: len(it[0]),
    )
    names = ", ".join(f"{state.nodes[item.peer_id].name} {item.first_layer}-{item.last_layer}" for item in held[:8])
    return NotFound(
        f"no node holds a checkpoint of {layers_text(missing)} of round {held[0].round}; there are: {names}",
        "wait for the next checkpoints, or name another --round or --node: see `atollctl checkpoint list`",
    )


def check_manifest(
    state: State, wanted: Checkpoint, committed: manifest_pb2.CommittedManifest, *, unverified: bool = False
) -> None:
    """Raise `PeerMisbehaved` or `SignatureInvalid` unless it is the manifest asked for, with the votes that count.

    `unverified`: a round that is not known here may pass with whatever votes; they must only be genuine, which the
    operator's side checks (`cli/pulled.py`).
    """
    head = parse_head(committed, wanted.run_id)
    name, memory = state.nodes[wanted.peer_id].name, state.memory[wanted.run_id]
    if head.hash != wanted.manifest_hash or head.round != wanted.round:
        raise PeerMisbehaved(f"{name} sent another manifest than the one that it said it holds", _ANOTHER)
    if not is_committed(state, wanted):
        if not unverified:
            raise PeerMisbehaved(f"round {wanted.round} of {name} is not known to have committed", _ANOTHER)
        return
    if len(head.signers) > len(state.nodes):
        raise PeerMisbehaved(f"the manifest from {name} carries votes of strangers", _ANOTHER)
    electorate = electorate_after(memory, head.round - 1)
    if electorate is not None:
        require_quorum(head, electorate, state.operator_key)
    verify_votes(head)


def connected(state: State, peer_id: str) -> bool:
    """Whether the node can be asked now."""
    live = state.live.get(peer_id)
    return live is not None and live.connected and not state.nodes[peer_id].banned
