"""Recovery of a run that has lost its electorate or its newest round. Pure.

A recovery issues a plan with a new *base*: a manifest, and the members that decide the round after it. Later rounds
that were made under earlier plans are void from then on, on every node that follows the plan. Nothing else reverts a
committed round. So a recovery starts in two cases only. First, the operator orders it (`recover`). Second, every node
that decides the next round is connected and reports an older head, or reports layers of the newest round as lost
(`recover_if_lost`). This happens after a power cut that returned the whole swarm to its checkpoints. No node can then
continue from the void rounds. If nodes each hold some layers, the run continues from the newest round of which all
layers still exist.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from atoll.coordinator.live import replan_trigger
from atoll.coordinator.live.attendance import attendance_of, eligible_nodes
from atoll.coordinator.live.plan_issue import PlanNotes, first_seats, issue_replica_plan, issue_route_plan, next_version
from atoll.coordinator.live.standbys import remaining_standbys
from atoll.coordinator.planner.plan_builder import routes_of
from atoll.coordinator.state import deciding, lookup
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.known_nodes import known_nodes
from atoll.coordinator.state.run_memory import Commit, RunMemory, electorate_after
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.coordinator.store.records import MAX_INTEGER, SHA256_BYTES, DropMetrics, Run
from atoll.core.errors import InvalidTransition
from atoll.core.plan import Base
from atoll.core.quorum import COORDINATOR
from atoll.v1 import membership_pb2 as mb


@dataclass(frozen=True, order=True)
class RecoveryPoint:
    """A committed state that connected nodes hold."""

    round: int
    holders: int  # of two results of one round, the one with more holders is preferred
    manifest_hash: bytes


def recover(state: State, now: StepTime, run_id: str, *, force: bool = False) -> Step[Run]:
    """Recover a run to the newest state that still exists. Raises `NotFound`, `InvalidTransition`.

    `force`: recover even if enough nodes to decide are connected. They cannot decide if they voted for a result that
    may be committed and none of them still has its state (docs/explain/rounds.md).
    """
    run = lookup.run(state, run_id)
    memory = state.memory[run.run_id]
    if run.state != "TRAINING" or memory.plan is None:
        raise InvalidTransition(
            f"run {run.run_id!r} is {run.state.lower()}: only a training run can be recovered",
            "start it first: `atollctl run start`",
        )
    eligible = eligible_nodes(state, run.run_id)
    point = _choose_recovery_point(state, run)
    if point is None:
        raise InvalidTransition(
            f"no connected nodes hold a complete state of run {run.run_id!r}",
            "start the nodes that still have their data directories, or create a new run",
        )
    electorate = electorate_after(memory, run.head_round)
    voters = eligible if deciding.abstains(run, memory) else [*eligible, COORDINATOR]
    decidable = electorate is not None and electorate.decides(voters) and point.round >= run.head_round
    if electorate is not None and decidable and not force:
        raise InvalidTransition(
            f"{len(electorate.members & set(voters))} of the {len(electorate.members)} seats "
            "can vote and the newest round is available: no recovery is needed",
            "see how rounds end in `atollctl run rounds`; if a lost result blocks them, recover with --force",
        )
    draft = Draft(state, now)
    recover_from(draft, run.run_id, point, "the operator recovered the run")
    return draft.done(draft.state.runs[run.run_id])


def recover_if_lost(draft: Draft, run_id: str, policy: Policy) -> None:
    """Recover once the newest round has been lost for `recover_seconds`, or layers of it for `lost_layers_seconds`."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    point = _point_if_all_are_behind(draft.state, run_id)
    timeout = policy.recover_seconds
    if point is None and (point := _point_if_layers_are_lost(draft.state, run_id)) is not None:
        timeout = policy.lost_layers_seconds
    if point is None:
        if memory.recoverable_since is not None:
            draft.remember(run_id, recoverable_since=None)
    elif memory.recoverable_since is None:
        draft.remember(run_id, recoverable_since=now)
    elif now - memory.recoverable_since >= timeout:
        recover_from(draft, run_id, point, "all holders lost the newest state")


def newest_held_state(state: State, run: Run) -> RecoveryPoint | None:
    """The newest committed state that eligible nodes report."""
    memory = state.memory[run.run_id]
    known = known_nodes(state, eligible_nodes(state, run.run_id))
    statuses = (state.live[peer].status for peer in known)
    holders = Counter(
        (status.head_round, status.head_hash) for status in statuses if len(status.head_hash) == SHA256_BYTES
    )
    found = (RecoveryPoint(number, count, digest) for (number, digest), count in holders.items())
    most = len(known) / 2
    return max((item for item in found if _is_in_valid_history(memory, item, most)), default=None)


def _is_in_valid_history(memory: RunMemory, point: RecoveryPoint, most: float) -> bool:
    """Whether a state belongs to the valid history: it is known here, or more than `most` nodes report it."""
    commit = memory.committed.get(point.round)
    if commit is not None:
        return commit.manifest_hash == point.manifest_hash
    known_base = memory.bases[-1].round if memory.bases else 0
    possible = known_base < point.round <= MAX_INTEGER and point.manifest_hash not in memory.void_manifest_hashes
    return possible and point.holders > most


def _point_if_all_are_behind(state: State, run_id: str) -> RecoveryPoint | None:
    """The recovery point, if all voters and planned nodes are connected and hold older heads than the newest round."""
    run, memory = state.runs[run_id], state.memory[run_id]
    electorate = electorate_after(memory, run.head_round)
    eligible = set(eligible_nodes(state, run_id))
    if memory.plan is None or electorate is None or not electorate.members:
        return None
    if not eligible >= (electorate.members - {COORDINATOR}) | set(memory.plan.members):
        return None
    if any(state.live[peer].status.head_round >= run.head_round for peer in eligible):
        return None
    return _choose_recovery_point(state, run)


def _point_if_layers_are_lost(state: State, run_id: str) -> RecoveryPoint | None:
    """The recovery point, if all planned holders lost some layer and all possible voters are connected."""
    run, memory = state.runs[run_id], state.memory[run_id]
    eligible, electorate = set(eligible_nodes(state, run_id)), electorate_after(memory, run.head_round)
    if memory.plan is None or electorate is None:
        return None
    never_returning = {COORDINATOR} | {
        peer for peer in electorate.members if peer in state.nodes and not _may_return(state, run.run_id, peer)
    }
    if not eligible >= set(memory.plan.members) | (electorate.members - never_returning):
        return None
    held: set[int] = set()
    for item in memory.plan.assignments:
        lost = frozenset(state.live[item.peer_id].status.lost_layers)
        held |= frozenset(range(item.first_layer, item.last_layer + 1)) - lost
    if len(held) == memory.plan.layers:
        return None
    return _newest_complete_round(state, run, below=run.head_round)


def _may_return(state: State, run_id: str, peer: str) -> bool:
    """Whether an absent node may return with its state."""
    node = state.nodes[peer]
    return node.run_id == run_id and not (node.banned or node.left)


def hold_all_layers(memory: RunMemory, holders: list[str]) -> bool:
    """Whether these nodes together hold all layers, if each has those of its span."""
    plan = memory.plan
    return plan is not None and _covers(plan.layers, [plan.span(peer) or range(0) for peer in holders])


def _choose_recovery_point(state: State, run: Run) -> RecoveryPoint | None:
    """The newest state of which all layers still exist."""
    memory = state.memory[run.run_id]
    cut = memory.plan is not None and len(memory.plan.routes) < len(memory.plan.stages)
    return _newest_complete_round(state, run) if cut else newest_held_state(state, run)


def _newest_complete_round(state: State, run: Run, below: int | None = None) -> RecoveryPoint | None:
    """The newest committed round of which planned nodes hold all layers, as state or in checkpoints.

    Nodes outside the plan are ignored: no member would fetch from them.
    """
    memory, eligible = state.memory[run.run_id], eligible_nodes(state, run.run_id)
    assert memory.plan is not None
    count = memory.plan.layers
    held: dict[tuple[int, bytes], list[tuple[str, range]]] = {}
    for peer in eligible:
        status, span = state.live[peer].status, memory.plan.span(peer)
        settled = (
            status.state != mb.NODE_STATE_CATCHING_UP
        )  # while it catches up, it may still hold the layers of an earlier plan
        if span and settled and len(status.head_hash) == SHA256_BYTES and not status.lost_layers:
            held.setdefault((status.head_round, status.head_hash), []).append((peer, span))
        for item in state.checkpoints.get(peer, ()) if span else ():
            held.setdefault((item.round, item.manifest_hash), []).append((peer, item.layers))
    known = set(known_nodes(state, eligible))
    whole = (
        RecoveryPoint(number, len(known.intersection(peer for peer, _ in holdings)), digest)
        for (number, digest), holdings in held.items()
        if (below is None or number < below) and _covers(count, [span for _, span in holdings])
    )
    return max((item for item in whole if _is_in_valid_history(memory, item, len(known) / 2)), default=None)


def _covers(count: int, spans: list[range]) -> bool:
    """True if these spans cover layers 0 to `count` - 1."""
    end = 0
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > end:
            return False
        end = max(end, span.stop)
    return end >= count


def recover_from(draft: Draft, run_id: str, point: RecoveryPoint, why: str) -> None:
    """Make `point` the base of the run. Later rounds, and other results of earlier rounds, become void."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    eligible = eligible_nodes(draft.state, run_id)
    void = {number: commit for number, commit in memory.committed.items() if number > point.round}
    kept = {number: commit for number, commit in memory.committed.items() if number <= point.round}
    kept.setdefault(point.round, Commit(point.manifest_hash, committed_tokens=None))
    draft.remember(
        run_id,
        committed=kept,
        void_manifest_hashes=memory.void_manifest_hashes | {commit.manifest_hash for commit in void.values()},
        fork=None,
        training_scores={},  # some belong to rounds that are void now
        training_compared={},
        recent_manifests={number: it for number, it in memory.recent_manifests.items() if number <= point.round},
        recoverable_since=None,
        inquiry=None,
    )
    draft.forget_votes(run_id, list(memory.votes))
    draft.log(DropMetrics(run_id, point.round))
    tokens = max(
        commit.committed_tokens or 0 for commit in kept.values()
    )  # a lower bound if the round's count is unknown
    loss_round = min(run.loss_round, point.round)
    draft.put(replace(run, head_round=point.round, committed_tokens=tokens, loss_round=loss_round))
    lost = f"rounds {point.round + 1} to {run.head_round} are void" if void else "no reported round is lost"
    message = f"{why}: it continues from round {point.round}, held by {_nodes(point.holders)}; {lost}"
    draft.event("run.recovered", run_id, str(point.round), message)
    _issue(draft, run_id, point, eligible, f"{why}, from round {point.round}")


def _issue(draft: Draft, run_id: str, point: RecoveryPoint, eligible: list[str], reason: str) -> None:
    """Issue the plan with the new base to connected nodes. Routes stay; `live/replan_trigger.py` repairs them."""
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    version = next_version(run)
    if memory.plan is None or not replan_trigger.needs_routes(
        draft.state, run_id, attendance_of(draft.state, run_id, draft.now.monotonic)
    ):
        seats = first_seats(known_nodes(draft.state, eligible) or eligible)
        issue_replica_plan(draft, run_id, eligible, reason, Base(point.manifest_hash, seats, point.round, version))
        return
    routes = routes_of(memory.plan)
    whole = [route for route in routes if all(part.peer_id in eligible for part in route)] or list(routes)
    members = {part.peer_id for route in whole for part in route}
    seats = first_seats(known_nodes(draft.state, members & set(eligible)) or eligible)
    base = Base(point.manifest_hash, seats, point.round, version)
    standing = remaining_standbys(draft.state, run_id, whole, eligible)
    issue_route_plan(draft, run_id, whole, reason, PlanNotes(left_out=memory.left_out), base, standbys=standing)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
