"""Take-over of a lost stage's layers by a standby or by a neighbour with a copy. Pure.

A standby takes the stage's place. A neighbour takes both spans, and the route becomes one stage shorter. The plan is
issued at once; the planner looks for a better layout afterwards.

A stage is gone once it may not train any more. If it has a backup, two more cases count:
- The stage lost its stream to the coordinator, and another stage of its route cannot reach it.
- With a standby: the stage's process was restarted. Its training since the last round is lost anyway. A neighbour waits
  for a restarted stage, which loads its layers as fast as the neighbour would.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from atoll.coordinator.live import plan_spacing
from atoll.coordinator.live.attendance import Attendance, live_of
from atoll.coordinator.live.backup_fetches import is_training, may_hold
from atoll.coordinator.live.neighbour_copies import NeighbourPair, complete_copies, neighbour_pairs
from atoll.coordinator.live.plan_issue import PlanNotes, issue_route_plan
from atoll.coordinator.live.standbys import issue_with_standbys, remaining_standbys
from atoll.coordinator.planner.plan_builder import Route, routes_of
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.snapshot import Policy, State
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

_MIN_OUTAGE_SECONDS = 1.0  # shorter losses of a stage's stream are ignored
_UNCONFIRMED_TAKE_OVER_SECONDS = 60.0  # between take-overs whose need only the node that takes over reports
_SETTLE_SECONDS = 20.0  # for a shortened route to train again before the planner is asked
_SERVING_STATES = (mb.NODE_STATE_READY, mb.NODE_STATE_TRAINING)


def take_over(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> bool:
    """Issue a plan that gives spans of stages that are gone to their backups.

    Returns False if no stage is gone, or if other routes train and the last plan is too recent (`plan_spacing.py`).
    """
    promoted = _promote_standbys(draft, run_id, policy, attendance)
    return promoted or _extend_neighbours(draft, run_id, policy, attendance)


def is_set_aside_copy_needed(state: State, run_id: str, attendance: Attendance, now: float) -> bool:
    """True if a stage is gone whose copy is set aside because its holder fetches layers for a prepared plan."""
    memory = state.memory[run_id]
    if memory.plan is None or memory.preparation is None or not memory.copy_fetches:
        return False
    set_aside = memory.preparation.spans.keys() & memory.copy_fetches.keys()
    return any(
        pair.holder in set_aside
        and memory.copy_fetches[pair.holder].span == pair.joint_span
        and _is_gone(state, memory.plan, pair.stage, attendance, now)
        for pair in neighbour_pairs(memory.plan)
    )


def _promote_standbys(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> bool:
    state, plan, now = draft.state, draft.state.memory[run_id].plan, draft.now.monotonic
    if plan is None or not plan.standbys:
        return False
    free = {
        peer: plan.span(peer)
        for peer in plan.standbys
        if peer in attendance.eligible and _is_current(state, run_id, peer)
    }
    successors: dict[str, str] = {}  # stage → standby
    for part in (part for route in routes_of(plan) for part in route):
        standby = next((peer for peer, held in sorted(free.items()) if held == part.span), None)
        if standby is not None and _can_be_replaced(state, plan, part.peer_id, attendance, now):
            del free[standby]
            successors[part.peer_id] = standby
    if not successors or not plan_spacing.may_issue(state, run_id, policy, attendance, now, gone=successors):
        return False
    routes = [
        tuple(replace(part, peer_id=successors.get(part.peer_id, part.peer_id)) for part in route)
        for route in routes_of(plan)
    ]
    names = {peer: state.nodes[peer].name for peer in (*successors, *successors.values())}
    reason = "; ".join(f"{names[standby]} takes the place of {names[stage]}" for stage, standby in successors.items())
    standbys = remaining_standbys(state, run_id, routes, attendance.plannable)
    return issue_with_standbys(draft, run_id, routes, standbys, reason)


def _extend_neighbours(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> bool:
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan = memory.plan
    taken = _take_overs(state, plan, attendance, now) if plan is not None else []
    if plan is None or not taken:
        return False
    extended, gone = {pair.holder: pair.joint_span for pair in taken}, {pair.stage for pair in taken}
    if not plan_spacing.may_issue(state, run_id, policy, attendance, now, gone=gone):
        return False
    routes = [_shortened(route, extended, gone) for route in routes_of(plan)]
    unconfirmed = [
        pair.holder for pair in taken if not _is_gone(state, plan, pair.stage, attendance, now, ignoring=pair.holder)
    ]
    names = [(state.nodes[pair.holder].name, state.nodes[pair.stage].name) for pair in taken]
    reason = "; ".join(sorted(f"{holder} takes over the layers of {stage} beside its own" for holder, stage in names))
    standbys = remaining_standbys(state, run_id, routes, attendance.plannable)
    if not issue_route_plan(draft, run_id, routes, reason, PlanNotes(left_out=memory.left_out), standbys=standbys):
        return False
    draft.remember(
        run_id,
        copy_fetches={peer: it for peer, it in memory.copy_fetches.items() if peer not in extended},
        unconfirmed_takeovers={**memory.unconfirmed_takeovers, **dict.fromkeys(unconfirmed, now)},
        no_question_before=now + _SETTLE_SECONDS,
    )
    return True


def _take_overs(state: State, plan: Plan, attendance: Attendance, now: float) -> list[NeighbourPair]:
    """Pairs whose holder takes over now. Each stage and each holder occurs once, and no holder is itself taken over."""
    found: list[NeighbourPair] = []
    holders: set[str] = set()
    gone: set[str] = set()
    for pair in complete_copies(state, plan):
        free = pair.stage not in gone and pair.holder not in holders and pair.holder not in gone
        if (
            free
            and _is_gone(state, plan, pair.stage, attendance, now)
            and _can_take(state, plan, pair, attendance, now)
        ):
            found.append(pair)
            holders.add(pair.holder)
            gone.add(pair.stage)
    return found


def _can_take(state: State, plan: Plan, pair: NeighbourPair, attendance: Attendance, now: float) -> bool:
    """True if the holder trains, both spans fit, its copy is current, and the stage's absence is credible."""
    trains = pair.holder in attendance.eligible and is_training(state, pair.holder)
    fits = may_hold(state, plan.run_id, pair.holder, pair.joint_span)
    if not (trains and fits and _is_newest(state, pair, attendance)):
        return False
    before = state.memory[plan.run_id].unconfirmed_takeovers.get(pair.holder)
    recently = before is not None and now - before < _UNCONFIRMED_TAKE_OVER_SECONDS
    return not recently or _is_gone(state, plan, pair.stage, attendance, now, ignoring=pair.holder)


def _is_newest(state: State, pair: NeighbourPair, attendance: Attendance) -> bool:
    """True for a copy of the newest round, or for a slightly older one if its stage is gone."""
    newest = state.runs[state.nodes[pair.holder].run_id].head_round
    lost = pair.stage not in attendance.present_peers
    return lost or live_of(state, pair.holder).status.prepared_round >= newest


def _is_current(state: State, run_id: str, peer: str) -> bool:
    """True if a standby has the newest round of its layers, or nearly."""
    status = live_of(state, peer).status
    recent = status.head_round + prefetch.MAX_ROUNDS_BEHIND >= state.runs[run_id].head_round
    return recent and status.state in _SERVING_STATES and not status.lost_layers


def _shortened(route: Route, extended: Mapping[str, range], gone: Collection[str]) -> Route:
    """The route without stages that are gone, and with the extended spans of their neighbours."""
    left = (part for part in route if part.peer_id not in gone)
    return tuple(
        replace(part, first=span.start, last=span.stop - 1) if (span := extended.get(part.peer_id)) else part
        for part in left
    )


def _can_be_replaced(state: State, plan: Plan, peer: str, attendance: Attendance, now: float) -> bool:
    """True if a stage is gone, or its process restarted: its training since the last round is then lost anyway."""
    return _was_restarted(state, peer, attendance) or _is_gone(state, plan, peer, attendance, now)


def _is_gone(state: State, plan: Plan, peer: str, attendance: Attendance, now: float, *, ignoring: str = "") -> bool:
    """True if a stage may not train any more, or lost its stream and another stage of its route cannot reach it.

    Reports of the peer id `ignoring` do not count.
    """
    if peer not in attendance.present_peers:
        return True
    live = state.live.get(peer)
    if peer not in attendance.awaited or live is None or live.connected or not live.profile.device:
        return False  # without a device, it has not reported since the coordinator started
    route = next(route for route in plan.routes if peer in route)
    others = [state.live[other] for other in route if other not in (peer, ignoring) and other in state.live]
    missed = any(
        other.connected and other.last_message_at > live.last_message_at and other.status.missing_stage == peer
        for other in others
    )
    return missed and now - live.last_message_at >= _MIN_OUTAGE_SECONDS


def _was_restarted(state: State, peer: str, attendance: Attendance) -> bool:
    live = state.live.get(peer)
    if peer not in attendance.awaited or live is None or not (live.connected or not live.profile.device):
        return False
    return live.status.state == mb.NODE_STATE_JOINING
