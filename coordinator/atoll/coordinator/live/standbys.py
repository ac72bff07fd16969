"""Standbys: nodes without a place on a route that hold the span of one stage, so that they can replace it. Pure.

A standby is a member of the plan: it takes part in the rounds of its layers without contributing, so it is always at
the newest round. `stage_take_over.py` gives it the stage's place when the stage is gone. Each span has at most one
standby; spans with the fewest holders come first. A standby keeps its span while some stage has the same span. A new
one fetches its layers before it becomes a member. A node is no standby if its link could not carry the rounds of its
layers. A node that leaves and returns waits longer each time before it becomes a standby again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from atoll.coordinator.live import plan_issue, plan_spacing, quorum_guard
from atoll.coordinator.live.attendance import Attendance, live_of, recent_joins
from atoll.coordinator.live.backup_fetches import (
    links_carry,
    may_fetch,
    may_hold,
    parameters_of,
    pending_fetches,
    was_slow_recently,
)
from atoll.coordinator.live.plan_issue import PlanNotes, issue_route_plan
from atoll.coordinator.live.span_fit import span_memory_of
from atoll.coordinator.planner.plan_builder import Route, routes_of
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.state.snapshot import Policy, State
from atoll.core.plan import Plan

_BATCH_WAIT_SECONDS = 30.0  # for other new standbys to become ready, because each plan disturbs every node
_MAX_STANDBY_DELAY_SECONDS = 600.0  # before a node that left and returned becomes a standby again


def remaining_standbys(
    state: State, run_id: str, routes: Sequence[Route], present_peers: Collection[str]
) -> dict[str, range]:
    """Spans, by peer id, of the current standbys that fit these routes."""
    plan = state.memory[run_id].plan
    standing = standby_spans(plan) if plan is not None else {}
    return _possible_standbys(state, run_id, routes, present_peers, standing)


def update_standbys(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> None:
    """Choose nodes that fetch spans, and issue a plan with them as members once they have their layers."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan = memory.plan
    if plan is None or memory.no_plan_reason:  # then a stage may be gone, and members keep their current plan
        return
    wanted = _wanted_standbys(state, run_id, plan, attendance, now)
    voters = _only_voters(state, plan, wanted)
    standing = {peer: span for peer, span in standby_spans(plan).items() if peer not in voters}
    new = {peer: span for peer, span in wanted.items() if standing.get(peer) != span}
    pending = pending_fetches(draft, run_id, policy, new, memory.standby_fetches)
    waited = {
        peer: now - it.since
        for peer, it in pending.items()
        if prefetch.has_prefetched(state, peer, it.span)
        and now - it.since >= _standby_delay_seconds(memory, peer, policy, now)
    }
    longest = max(waited.values(), default=0.0)
    enough = waited and (len(waited) == len(pending) or longest >= policy.standby_seconds + _BATCH_WAIT_SECONDS)
    staying = {peer: span for peer, span in standing.items() if wanted.get(peer) == span}
    due = enough or staying.keys() != standing.keys()
    if due and plan_spacing.may_issue(state, run_id, policy, attendance, now):
        after = staying | {peer: pending.pop(peer).span for peer in sorted(waited)}
        if issue_with_standbys(draft, run_id, routes_of(plan), after, _change_text(state, standing, after)):
            draft.remember(run_id, standby_fetches=pending)
    elif pending != memory.standby_fetches:
        draft.remember(run_id, standby_fetches=pending)


def standby_spans(plan: Plan) -> dict[str, range]:
    """Layers of each standby, by peer id."""
    return {peer: plan.span(peer) for peer in plan.standbys}


def _wanted_standbys(state: State, run_id: str, plan: Plan, attendance: Attendance, now: float) -> dict[str, range]:
    """Spans, by peer id, of the nodes that should be standbys: current ones first, then fetching, then new ones."""
    memory, routes = state.memory[run_id], routes_of(plan)
    staying = remaining_standbys(state, run_id, routes, attendance.plannable)
    found = {span: peer for peer, span in sorted(staying.items(), reverse=True)}
    fetching = {
        peer: it.span for peer, it in memory.standby_fetches.items() if not was_slow_recently(memory, peer, now)
    }
    for peer, span in sorted(_possible_standbys(state, run_id, routes, attendance.eligible, fetching).items()):
        found.setdefault(span, peer)
    open_spans = [span for span in _stage_spans(routes) if span not in found]
    if open_spans:
        taken = {*found.values(), *plan.stages}
        free = [peer for peer in attendance.eligible if peer not in taken and may_fetch(state, run_id, peer, now)]
        found |= _new_standbys(state, plan, open_spans, free)
    return {peer: span for span, peer in found.items()}


def _new_standbys(state: State, plan: Plan, open_spans: Sequence[range], free: list[str]) -> dict[range, str]:
    """Choose a node from `free` for each span. Spans with the fewest holders come first."""
    found: dict[range, str] = {}
    for span in sorted(open_spans, key=lambda it: (len(plan.holders(it)), -len(it), it.start)):
        able = [peer for peer in free if _can_stand_by(state, plan.run_id, peer, span)]
        if able:
            found[span] = min(able, key=lambda peer: _preference(state, peer, span))
            free.remove(found[span])
    return found


def _possible_standbys(
    state: State, run_id: str, routes: Sequence[Route], present_peers: Collection[str], spans: Mapping[str, range]
) -> dict[str, range]:
    """The entries of `spans` (by peer id) that equal a stage's span, if the node is present, unplaced and fits it."""
    stages, placed = _stage_spans(routes), {part.peer_id for route in routes for part in route}
    return {
        peer: span
        for peer, span in spans.items()
        if span in stages and peer in present_peers and peer not in placed and may_hold(state, run_id, peer, span)
    }


def _stage_spans(routes: Collection[Route]) -> frozenset[range]:
    return frozenset(part.span for route in routes if len(route) > 1 for part in route)


def _can_stand_by(state: State, run_id: str, peer: str, span: range) -> bool:
    """True if a node may hold the span, and its link carries the averages of these layers between two rounds."""
    if not may_hold(state, run_id, peer, span):
        return False
    model = span_memory_of(state, run_id)
    if model is None:
        return True
    sent_bytes = model.training.outer_bytes_per_parameter * parameters_of(state, run_id, span)
    return links_carry(state, (peer,), sent_bytes, plan_issue.round_seconds(state.memory[run_id]))


def _preference(state: State, peer: str, span: range) -> tuple[bool, int, str]:
    """Sort key: first nodes with a checkpoint of the span, then small devices, because large ones suit more spans."""
    saved = any(set(span) <= set(item.layers) for item in state.checkpoints.get(peer, ()))
    return not saved, live_of(state, peer).profile.device_memory_bytes, peer


def _standby_delay_seconds(memory: RunMemory, peer: str, policy: Policy, now: float) -> float:
    """Seconds that a node waits without a place before it becomes a standby; recent joins of the plan double them."""
    doublings = max(0, recent_joins(memory, peer, now) - 1)
    return min(_MAX_STANDBY_DELAY_SECONDS, policy.standby_seconds * 2.0**doublings)


def issue_with_standbys(
    draft: Draft, run_id: str, routes: Sequence[Route], standbys: Mapping[str, range], reason: str
) -> bool:
    """Issue a plan with other standbys or holders. The predicted pace of the current plan stays valid.

    Returns False without a plan if its members could not decide the next round.
    """
    memory = draft.state.memory[run_id]
    predicted = memory.figures.predicted_tokens_per_second if memory.figures else 0.0
    notes = PlanNotes(predicted, 0.0, memory.left_out)
    if not issue_route_plan(draft, run_id, routes, reason, notes, standbys=standbys):
        return False
    left_out = {peer: why for peer, why in memory.left_out.items() if peer not in standbys}
    draft.remember(run_id, left_out=left_out)
    return True


def _only_voters(state: State, plan: Plan, wanted: Mapping[str, range]) -> Collection[str]:
    """Peer ids that stay members only because their votes are needed for a quorum."""
    members = (*plan.stages, *(peer for peer, span in wanted.items() if plan.span(peer) == span))
    spans = {peer: plan.span(peer) for peer in members}
    return quorum_guard.voters_to_keep(state, plan.run_id, spans)


def _change_text(state: State, before: Mapping[str, range], after: Mapping[str, range]) -> str:
    new = [
        f"{state.nodes[peer].name} stands by with layers {span.start}–{span.stop - 1}"
        for peer, span in sorted(after.items())
        if before.get(peer) != span
    ]
    ended = [f"{state.nodes[peer].name} stands by no more" for peer in sorted(before.keys() - after.keys())]
    return "; ".join(new + ended)
