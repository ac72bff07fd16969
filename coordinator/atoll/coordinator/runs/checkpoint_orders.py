"""The operator's order to write a checkpoint now, and its progress. Pure.

All nodes get one target round, and each writes its first committed state of that round or a later one. The first target
is the newest round. Nodes that each hold some layers may then write different rounds, since training continues. So if
all have written but layers are missing, the next round becomes the target, which all nodes reach at the same time. The
same happens after a while if some nodes have not written: their disks may be full, and others may hold their layers.

An order lasts while the operator repeats it. It is not stored: after a restart the next repetition renews it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.coordinator.rounds.round_checks import layer_count
from atoll.coordinator.runs import checkpoints
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.run_memory import CheckpointOrder
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import SHA256_BYTES, Checkpoint, Node, Run
from atoll.core.errors import InvalidTransition, NotFound, Unreachable
from atoll.core.units import layers_text

ORDER_SECONDS = 30.0  # without a repetition
RETARGET_SECONDS = 10.0  # least time between two targets
PATIENCE_SECONDS = 120.0  # most time for writing one target, before there is another
MAX_NAMED_NODES = 20


@dataclass(frozen=True)
class Progress:
    """Progress of an order."""

    run_id: str
    wanted: int  # the ordered round; a newer one fulfils the order too
    written_round: int  # round for which `held` has all layers; 0: none
    held: tuple[Checkpoint, ...]
    waiting: tuple[str, ...]  # names of nodes that have not written yet
    missing: str  # layers that no checkpoint of the most complete round contains


def order(state: State, now: StepTime, run_id: str, wanted: int) -> Step[Progress]:
    """Order a checkpoint of round `wanted` (0: the newest) or a newer one, or repeat the order; return its progress.

    Raises `NotFound`, `Ambiguous`, `InvalidTransition` before the first round, and `Unreachable` if no node can write.
    """
    run = lookup.run(state, run_id)
    if run.head_round == 0:
        raise InvalidTransition(
            f"run {run.run_id!r} has committed no round yet: there is no state to write",
            "see `atollctl run show`",
        )
    if wanted > run.head_round:
        raise NotFound(f"round {wanted} is not known; the newest of run {run.run_id!r} is {run.head_round}")
    wanted = wanted or run.head_round
    found = _progress(state, run, wanted)
    draft = Draft(state, now)
    if found.written_round:
        draft.remember(run.run_id, checkpoint_order=None)
        return draft.done(found)
    if not _writers(state, run):
        raise Unreachable(
            f"no connected node of run {run.run_id!r} holds its state",
            "see `atollctl node list`; checkpoints that were written before: `atollctl checkpoint list`",
        )
    present = state.memory[run.run_id].checkpoint_order
    if present is None:  # else keep another operator's order: a newer round fulfils both
        present = CheckpointOrder(wanted, max(wanted, run.head_round), now.monotonic, now.monotonic)
    draft.remember(run.run_id, checkpoint_order=replace(present, asked_at=now.monotonic))
    return draft.done(found)


def round_to_write(state: State, node: Node) -> int:
    """The round that this node should write as a checkpoint (or a newer one); 0: none."""
    present = state.memory[node.run_id].checkpoint_order
    return present.target if present is not None and "node" in node.roles else 0


def _next_target(state: State, run: Run, order: CheckpointOrder, now: float) -> int:
    if run.state != "TRAINING":
        return max(order.wanted, run.head_round)  # there may be no next round
    heads = _writers(state, run).items()
    pending = any(head >= order.target > _newest_written(state, peer) for peer, head in heads)
    if run.head_round > order.target and (not pending or now - order.target_since >= PATIENCE_SECONDS):
        return run.head_round + 1
    return order.target


def keep_up(draft: Draft, run_id: str) -> None:
    """End an order that is fulfilled or not repeated.

    Choose another target if the current one cannot fulfil the order.
    """
    state, now = draft.state, draft.now.monotonic
    run, present = state.runs[run_id], state.memory[run_id].checkpoint_order
    if present is None:
        return
    if now - present.asked_at >= ORDER_SECONDS or _progress(state, run, present.wanted).written_round:
        draft.remember(run_id, checkpoint_order=None)
        return
    if now - present.target_since < RETARGET_SECONDS:
        return
    target = _next_target(state, run, present, now)
    if target != present.target:
        draft.remember(run_id, checkpoint_order=replace(present, target=target, target_since=now))


def _progress(state: State, run: Run, wanted: int) -> Progress:
    """Progress from checkpoints of connected nodes; only rounds that are known to have committed count."""
    count = layer_count(run.layers)
    states: dict[tuple[int, bytes], list[Checkpoint]] = {}
    for item in checkpoints.checkpoints_of_run(state, run.run_id):
        if (
            item.round >= wanted
            and checkpoints.connected(state, item.peer_id)
            and checkpoints.is_committed(state, item)
        ):
            states.setdefault((item.round, item.manifest_hash), []).append(item)
    for held in states.values():
        if checkpoints.fewest_covering(held, count):
            return Progress(run.run_id, wanted, held[0].round, tuple(held), (), "")
    best = min(states.values(), key=lambda held: len(_missing(held, count)), default=[])
    late = [state.nodes[peer].name for peer in _writers(state, run) if _newest_written(state, peer) < wanted]
    waiting = tuple(sorted(late)[:MAX_NAMED_NODES])
    return Progress(run.run_id, wanted, 0, tuple(best), waiting, layers_text(_missing(best, count)))


def _missing(held: Sequence[Checkpoint], count: int) -> set[int]:
    return set(range(count)).difference(*(item.layers for item in held))


def _writers(state: State, run: Run) -> Mapping[str, int]:
    """Head rounds of the connected nodes that hold state, by peer id."""
    found = {}
    for node in state.members_of(run.run_id):
        live = state.live.get(node.peer_id)
        if "node" not in node.roles or live is None or not checkpoints.connected(state, node.peer_id):
            continue
        if live.status.head_round and len(live.status.head_hash) == SHA256_BYTES:
            found[node.peer_id] = live.status.head_round
    return found


def _newest_written(state: State, peer_id: str) -> int:
    """The newest round that the node has written and that is known to have committed.

    Other reports may be false or void.
    """
    held = state.checkpoints.get(peer_id, ())
    return max((item.round for item in held if checkpoints.is_committed(state, item)), default=0)
