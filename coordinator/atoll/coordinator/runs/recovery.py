"""Going on from a state that is left, when those who decide are gone or the newest round is lost to all of them. Pure.

A recovery issues a plan with a new *base*: a manifest, and who decides the round after it. Higher rounds that were
made under earlier plans are void from then on, on every node that follows the plan. Nothing else ever goes back
behind a committed round, so there are two ways only: the operator orders it (`recover`), or every node that decides
the next round is here and says that it holds an older one, or that layers of it are lost to all who should hold them
(`watch`), as after a power cut that took the whole swarm back to its checkpoints. Then nobody is left who could go on
with what is made void. Where nodes hold some layers each, it goes on from the newest round that all layers are left of.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from atoll.coordinator.live import replan_trigger
from atoll.coordinator.live.attendance import attendance_of, eligible_nodes
from atoll.coordinator.live.backup_spans import remaining_standbys
from atoll.coordinator.live.plan_issue import PlanNotes, issue_replica_plan, issue_route_plan, next_version
from atoll.coordinator.planner.plan_builder import routes_of
from atoll.coordinator.rounds import tie_break_votes
from atoll.coordinator.rounds.round_checks import MAX_ROUNDS_AHEAD
from atoll.coordinator.state import lookup
from atoll.coordinator.state.snapshot import Commit, Draft, Policy, RunMemory, State, Step, StepTime, electorate_after
from atoll.coordinator.store.records import Run
from atoll.core.errors import InvalidTransition
from atoll.core.plan import Base
from atoll.v1 import membership_pb2 as mb

_HASH_BYTES = 32


@dataclass(frozen=True, order=True)
class RecoveryPoint:
    """A committed state that connected nodes hold."""

    round: int
    holders: int  # of two results with one number, the one that more nodes hold is newer
    manifest_hash: bytes


def recover(state: State, now: StepTime, run_id: str, *, force: bool = False) -> Step[Run]:
    """Go on from the newest state that is left. Raises `NotFound`, `InvalidTransition`.

    `force`: although enough nodes to decide are here. They cannot, when a result that they voted for may have been
    committed and none of them has its state any more (docs/explain/rounds.md).
    """
    run = lookup.run(state, run_id)
    memory = state.memory[run.run_id]
    if run.state != "TRAINING" or memory.plan is None:
        raise InvalidTransition(
            f"run {run.run_id!r} is {run.state.lower()}: only a run that trains can be recovered",
            "start it first: `atollctl run start`",
        )
    here = eligible_nodes(state, run.run_id)
    left = _choose_recovery_point(state, run)
    if left is None:
        raise InvalidTransition(
            f"no connected nodes hold any whole state of run {run.run_id!r}: there is nothing to go on from",
            "start the nodes that still have their data directories, or begin a new run",
        )
    electorate = electorate_after(memory, run.head_round)
    tie_break = not tie_break_votes.abstains(run, memory)
    decidable = electorate is not None and electorate.decides(set(here), tie_break) and left.round >= run.head_round
    if electorate is not None and decidable and not force:
        raise InvalidTransition(
            f"{len(electorate.members & set(here))} of the {len(electorate.members)} nodes that decide the next round "
            "are connected, and the newest round is there: nothing needs to be recovered",
            "see `atollctl run rounds` for how rounds end; if a lost result blocks them, recover with --force",
        )
    draft = Draft(state, now)
    _recover_from(draft, run.run_id, left, "the operator recovered the run")
    return draft.done(draft.state.runs[run.run_id])


def watch(draft: Draft, run_id: str, policy: Policy) -> None:
    """Recover by itself once it has been plain for a while that the newest round is lost to all who decide."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    left = _point_if_all_are_behind(draft.state, run_id)
    patience = policy.recover_seconds
    if left is None and (left := _point_if_layers_are_lost(draft.state, run_id)) is not None:
        patience = policy.lost_layers_seconds
    if left is None:
        if memory.recoverable_since is not None:
            draft.remember(run_id, recoverable_since=None)
    elif memory.recoverable_since is None:
        draft.remember(run_id, recoverable_since=now)
    elif now - memory.recoverable_since >= patience:
        _recover_from(draft, run_id, left, "the newest state is lost to all who held it")


def newest_held_state(state: State, run: Run) -> RecoveryPoint | None:
    """The newest committed state that fit nodes say they hold."""
    memory = state.memory[run.run_id]
    told = (state.live[peer].status for peer in eligible_nodes(state, run.run_id))
    held = Counter((status.head_round, status.head_hash) for status in told if len(status.head_hash) == _HASH_BYTES)
    found = (RecoveryPoint(number, count, digest) for (number, digest), count in held.items())
    most = len(eligible_nodes(state, run.run_id)) / 2
    return max((item for item in found if _is_in_valid_history(run, memory, item, most)), default=None)


def _is_in_valid_history(run: Run, memory: RunMemory, left: RecoveryPoint, most: float) -> bool:
    """Whether a state is of the history that counts: known here, or told by more than `most` nodes."""
    commit = memory.committed.get(left.round)
    if commit is not None:
        return commit.manifest_hash == left.manifest_hash
    known_base = memory.bases[-1].round if memory.bases else 0
    possible = known_base < left.round <= run.head_round + MAX_ROUNDS_AHEAD and left.manifest_hash not in memory.void
    return possible and left.holders > most


def _point_if_all_are_behind(state: State, run_id: str) -> RecoveryPoint | None:
    """What is left, if every node that decides the next round or is planned is here and holds an older one."""
    run, memory = state.runs[run_id], state.memory[run_id]
    electorate = electorate_after(memory, run.head_round)
    here = set(eligible_nodes(state, run_id))
    if memory.plan is None or electorate is None or not electorate.members:
        return None
    if not here >= electorate.members | set(memory.plan.members):
        return None
    if any(state.live[peer].status.head_round >= run.head_round for peer in here):
        return None
    return _choose_recovery_point(state, run)


def _point_if_layers_are_lost(state: State, run_id: str) -> RecoveryPoint | None:
    """What is left, if some layer is lost to all planned nodes that should hold it, and who may know more is here."""
    run, memory = state.runs[run_id], state.memory[run_id]
    here, electorate = set(eligible_nodes(state, run_id)), electorate_after(memory, run.head_round)
    if memory.plan is None or electorate is None:
        return None
    gone = {peer for peer in electorate.members if peer in state.nodes and not _may_return(state, peer)}
    if not here >= set(memory.plan.members) | (electorate.members - gone):
        return None
    held: set[int] = set()
    for item in memory.plan.assignments:
        lost = frozenset(state.live[item.peer_id].status.lost_layers)
        held |= frozenset(range(item.first_layer, item.last_layer + 1)) - lost
    if len(held) == memory.plan.layers:
        return None
    return _newest_complete_round(state, run, below=run.head_round)


def _may_return(state: State, peer: str) -> bool:
    """Whether a node that is away may come back with what it held."""
    node = state.nodes[peer]
    return not (node.banned or node.left)


def _choose_recovery_point(state: State, run: Run) -> RecoveryPoint | None:
    """The newest state that is left, of all layers."""
    memory = state.memory[run.run_id]
    cut = memory.plan is not None and len(memory.plan.routes) < len(memory.plan.stages)
    return _newest_complete_round(state, run) if cut else newest_held_state(state, run)


def _newest_complete_round(state: State, run: Run, below: int | None = None) -> RecoveryPoint | None:
    """The newest committed round of which planned nodes hold all layers: as their state, or in checkpoints.

    Others may hold some, too, but nobody would ask them.
    """
    memory, here = state.memory[run.run_id], eligible_nodes(state, run.run_id)
    assert memory.plan is not None
    count = memory.plan.layers
    held: dict[tuple[int, bytes], list[tuple[str, range]]] = {}
    for peer in here:
        status, span = state.live[peer].status, memory.plan.span(peer)
        settled = status.state != mb.NODE_STATE_CATCHING_UP  # else it may have what it held under an earlier plan
        if span and settled and len(status.head_hash) == _HASH_BYTES and not status.lost_layers:
            held.setdefault((status.head_round, status.head_hash), []).append((peer, span))
        for item in state.checkpoints.get(peer, ()) if span else ():
            held.setdefault((item.round, item.manifest_hash), []).append((peer, item.layers))
    whole = (
        RecoveryPoint(number, len({peer for peer, _ in those}), digest)
        for (number, digest), those in held.items()
        if (below is None or number < below) and _covers(count, [span for _, span in those])
    )
    return max((item for item in whole if _is_in_valid_history(run, memory, item, len(here) / 2)), default=None)


def _covers(count: int, spans: list[range]) -> bool:
    """Whether these spans hold layers 0 to `count` - 1."""
    end = 0
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > end:
            return False
        end = max(end, span.stop)
    return end >= count


def _recover_from(draft: Draft, run_id: str, left: RecoveryPoint, why: str) -> None:
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    here = eligible_nodes(draft.state, run_id)
    void = {number: commit for number, commit in memory.committed.items() if number > left.round}
    kept = {number: commit for number, commit in memory.committed.items() if number <= left.round}
    kept.setdefault(left.round, Commit(left.manifest_hash, committed_tokens=None))
    draft.remember(
        run_id,
        committed=kept,
        void=memory.void | {commit.manifest_hash for commit in void.values()},
        recoverable_since=None,
    )
    draft.forget_votes(run_id, list(memory.votes))
    draft.forget_waiting(run_id, list(memory.waiting))
    tokens = max(commit.committed_tokens or 0 for commit in kept.values())  # a lower bound where it is not known
    loss_round = min(run.loss_round, left.round)
    draft.put(replace(run, head_round=left.round, committed_tokens=tokens, loss_round=loss_round))
    lost = f"rounds {left.round + 1} to {run.head_round} are void" if void else "no round that was told is lost"
    told = f"{why}: it goes on from round {left.round}, which {_nodes(left.holders)}; {lost}"
    draft.event("run.recovered", run_id, str(left.round), told)
    _issue(draft, run_id, left, here, f"{why}, from round {left.round}")


def _issue(draft: Draft, run_id: str, left: RecoveryPoint, here: list[str], reason: str) -> None:
    """The plan with the new base, for who is here. Routes stay as they are: `routing` mends them afterwards."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    version = next_version(run)
    if memory.plan is None or not replan_trigger.needs_routes(
        draft.state, run_id, attendance_of(draft.state, run_id, draft.now.monotonic)
    ):
        issue_replica_plan(
            draft, run_id, here, reason, Base(left.manifest_hash, tuple(sorted(here)), left.round, version)
        )
        return
    routes = routes_of(memory.plan)
    whole = [route for route in routes if all(part.peer_id in here for part in route)] or list(routes)
    members = {part.peer_id for route in whole for part in route}
    voters = tuple(sorted(members & set(here))) or tuple(sorted(here))
    base = Base(left.manifest_hash, voters, left.round, version)
    standing = remaining_standbys(draft.state, run_id, whole, here)
    issue_route_plan(draft, run_id, whole, reason, PlanNotes(left_out=memory.left_out), base, standbys=standing)


def _nodes(count: int) -> str:
    return "1 node holds" if count == 1 else f"{count} nodes hold"
