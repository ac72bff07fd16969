"""Standbys: nodes without a place on a route hold the layers of a stage, and take its place when it is gone. Pure.

They are members: they take part in the rounds of their layers, bring nothing, and so are always at the newest round.
Each span of a stage has one at most, those with the fewest holders first; who stands by, or fetches layers to, keeps
them for as long as some stage has the same. A new one fetches its layers before it becomes a member. Nobody whose link
would not carry the rounds of its layers stands by; who comes and goes waits ever longer.

A stage is gone when it has no part in training any more. With somebody to take its place, that is not waited for: a
stage whose line to the coordinator broke, and that a neighbour on its route cannot reach, is gone; so is one whose
process was started again, because what it had not averaged yet is lost anyway. Its place goes to nobody who is behind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from atoll.coordinator.live import plan_issue, planner_question, stage_liveness
from atoll.coordinator.live.attendance import JOINS_FORGOTTEN_SECONDS, Attendance
from atoll.coordinator.live.pinning import pinned_span
from atoll.coordinator.live.plan_issue import STATE_BYTES_PER_PARAMETER, PlanNotes, issue_route_plan
from atoll.coordinator.live.span_fit import span_fits, span_memory_of
from atoll.coordinator.planner.plan_builder import Route, routes_of
from atoll.coordinator.planner.question import has_planner_inputs
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.snapshot import Draft, PendingFetch, PlanJoins, Policy, RunMemory, State
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

_BATCH_WAIT_SECONDS = 30.0  # for others to have their layers, too: each plan is a change for everybody
_MAX_STANDBY_DELAY_SECONDS = 600.0  # of who comes and goes, before it stands by again
_SERVING_STATES = (mb.NODE_STATE_READY, mb.NODE_STATE_TRAINING)


def take_over(draft: Draft, run_id: str, attendance: Attendance) -> bool:
    """Give the places of stages that are gone to those who stand by with the same layers. Whether any was given."""
    state, plan, now = draft.state, draft.state.memory[run_id].plan, draft.now.monotonic
    if plan is None or not plan.standbys:
        return False
    free = {
        peer: plan.span(peer)
        for peer in plan.standbys
        if peer in attendance.eligible and _is_current(state, run_id, peer)
    }
    routes, told = [], []
    for route in routes_of(plan):
        parts = []
        for part in route:
            span = range(part.first, part.last + 1)
            other = next((peer for peer, held in sorted(free.items()) if held == span), None)
            if other is not None and stage_liveness.can_be_replaced(state, plan, part.peer_id, attendance, now):
                del free[other]
                told.append(f"{state.nodes[other].name} takes the place of {state.nodes[part.peer_id].name}")
                parts.append(replace(part, peer_id=other))
            else:
                parts.append(part)
        routes.append(tuple(parts))
    if told:
        standing = kept(state, run_id, routes, [*attendance.eligible, *attendance.awaited])
        _issue(draft, run_id, routes, standing, "; ".join(told))
    return bool(told)


def follow(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> None:
    """Let those whom a plan has no place for fetch layers, and make them members when they have them."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan = memory.plan
    if plan is None:
        return
    wanted, standing = _wanted(state, run_id, plan, attendance, now), _standby_spans(plan)
    new = {peer: span for peer, span in wanted.items() if standing.get(peer) != span}
    coming = {
        peer: before if (before := memory.standbys.get(peer)) and before.span == span else PendingFetch(span, now)
        for peer, span in new.items()
    }
    ready = {peer for peer, it in coming.items() if prefetch.has_prefetched(state, peer, it.span)}
    late = {
        peer for peer, it in coming.items() if now - it.since >= fetch_deadline_seconds(state, run_id, it, policy)
    } - ready
    late |= {peer for peer, it in coming.items() if prefetch.reports_no_room(state, peer, it.span)}
    if late:
        draft.remember(run_id, fetch_timeouts={**memory.fetch_timeouts, **dict.fromkeys(late, now)})
    coming = {peer: it for peer, it in coming.items() if peer not in late}
    waited = {peer for peer in ready if now - coming[peer].since >= _standby_delay_seconds(memory, peer, policy, now)}
    longest = max((now - coming[peer].since for peer in waited), default=0.0)
    enough = waited and (len(waited) == len(coming) or longest >= policy.standby_seconds + _BATCH_WAIT_SECONDS)
    stay = {peer: span for peer, span in standing.items() if wanted.get(peer) == span}
    if enough or stay.keys() != standing.keys():
        came = {peer: coming.pop(peer).span for peer in sorted(waited)}
        draft.remember(run_id, standbys=coming)
        _issue(draft, run_id, routes_of(plan), {**stay, **came}, _change_text(state, standing, {**stay, **came}))
    elif coming != memory.standbys:
        draft.remember(run_id, standbys=coming)


def kept(state: State, run_id: str, routes: Sequence[Route], present_peers: Collection[str]) -> dict[str, range]:
    """Who of those who are there stands by, and can go on with that where these are the routes."""
    plan = state.memory[run_id].plan
    standing = _standby_spans(plan) if plan is not None else {}
    return _able(state, run_id, routes, present_peers, standing)


def fetch_deadline_seconds(state: State, run_id: str, coming: PendingFetch, policy: Policy) -> float:
    """Seconds that a node may take to fetch its layers."""
    weights = plan_issue.layer_weights(state.runs[run_id])
    fetched = STATE_BYTES_PER_PARAMETER * sum(weights[layer] for layer in coming.span)
    return policy.prepare_seconds + fetched / prefetch.ASSUMED_MIN_BYTES_PER_SECOND


# --- who stands by -----------------------------------------------------------------------------------


def _standby_spans(plan: Plan) -> dict[str, range]:
    return {peer: plan.span(peer) for peer in plan.standbys}


def _wanted(state: State, run_id: str, plan: Plan, attendance: Attendance, now: float) -> dict[str, range]:
    """By peer id: who should stand by with which layers."""
    memory, routes = state.memory[run_id], routes_of(plan)
    present_peers = [*attendance.eligible, *attendance.awaited]
    found = {span: peer for peer, span in sorted(kept(state, run_id, routes, present_peers).items(), reverse=True)}
    fetching = {
        peer: it.span
        for peer, it in memory.standbys.items()
        if not planner_question.lately(memory.fetch_timeouts, peer, now)
    }
    for peer, span in sorted(_able(state, run_id, routes, attendance.eligible, fetching).items()):
        found.setdefault(span, peer)
    taken = {*found.values(), *plan.stages}
    open_spans = [span for span in _stage_spans(routes) if span not in found]
    free = (
        [peer for peer in attendance.eligible if peer not in taken and _may_stand_by(state, run_id, peer, now)]
        if open_spans
        else []
    )
    weights = plan_issue.layer_weights(state.runs[run_id]) if free else []
    for span in sorted(open_spans, key=lambda it: (len(plan.holders(it)), -len(it), it.start)):
        able = [
            peer
            for peer in free
            if _fits(state, run_id, peer, span)
            and _link_keeps_up(state, run_id, peer, sum(weights[layer] for layer in span))
        ]
        if able:
            found[span] = min(able, key=lambda peer: _preference(state, peer, span))
            free.remove(found[span])
    return {peer: span for span, peer in found.items()}


def _able(
    state: State, run_id: str, routes: Sequence[Route], present_peers: Collection[str], spans: Mapping[str, range]
) -> dict[str, range]:
    """Of who holds or fetches these spans: who is there, has no place, and still has room for what is a stage's."""
    stages, placed = _stage_spans(routes), {part.peer_id for route in routes for part in route}
    return {
        peer: span
        for peer, span in spans.items()
        if span in stages and peer in present_peers and peer not in placed and _fits(state, run_id, peer, span)
    }


def _stage_spans(routes: Collection[Route]) -> frozenset[range]:
    return frozenset(range(part.first, part.last + 1) for route in routes if len(route) > 1 for part in route)


def _may_stand_by(state: State, run_id: str, peer: str, now: float) -> bool:
    slow = planner_question.lately(state.memory[run_id].fetch_timeouts, peer, now)
    return has_planner_inputs(planner_question.live_of(state, peer).profile) and not slow


def _fits(state: State, run_id: str, peer: str, span: range) -> bool:
    """Whether a node has room for the span, as far as it told, and is not pinned to another."""
    pinned = pinned_span(state.nodes[peer])
    return span_fits(state, run_id, peer, span) and pinned in (None, (span.start, span.stop - 1))


def _link_keeps_up(state: State, run_id: str, peer: str, parameters: float) -> bool:
    """Whether its link carries the averages of so many parameters between two of their rounds, where both are known.

    Only what it sends was ever measured; homes receive faster.
    """
    model, uplink = span_memory_of(state, run_id), plan_issue.reported_links(state, [peer])[peer].uplink
    if not uplink or model is None:
        return True
    sent = parameters * model.training.outer_bytes_per_parameter
    return sent / uplink <= plan_issue.round_seconds(state.memory[run_id])


def _preference(state: State, peer: str, span: range) -> tuple[bool, int, str]:
    """Who has most of it already, then the smallest card: larger ones suit more spans."""
    saved = any(set(span) <= set(item.layers) for item in state.checkpoints.get(peer, ()))
    return not saved, planner_question.live_of(state, peer).profile.device_memory_bytes, peer


def _standby_delay_seconds(memory: RunMemory, peer: str, policy: Policy, now: float) -> float:
    """Seconds without a place before a node stands by: longer the more often it came into plans lately."""
    plan_joins = memory.plan_joins.get(peer, PlanJoins())
    lately = plan_joins.count if now - plan_joins.at < JOINS_FORGOTTEN_SECONDS else 0
    return min(_MAX_STANDBY_DELAY_SECONDS, policy.standby_seconds * 2.0 ** max(0, lately - 1))


def _is_current(state: State, run_id: str, peer: str) -> bool:
    """Whether who stands by has the newest round of its layers, or nearly."""
    status = planner_question.live_of(state, peer).status
    recent = status.head_round + prefetch.MAX_ROUNDS_BEHIND >= state.runs[run_id].head_round
    return recent and status.state in _SERVING_STATES and not status.lost_layers


# --- plans -------------------------------------------------------------------------------------------


def _issue(draft: Draft, run_id: str, routes: Sequence[Route], standing: Mapping[str, range], reason: str) -> None:
    memory = draft.state.memory[run_id]
    predicted = memory.figures.predicted_tokens_per_second if memory.figures else 0.0
    notes = PlanNotes(predicted, 0.0, memory.left_out)
    issue_route_plan(draft, run_id, routes, reason, notes, standbys=standing)
    left_out = {peer: why for peer, why in memory.left_out.items() if peer not in standing}
    draft.remember(run_id, left_out=left_out)


def _change_text(state: State, before: Mapping[str, range], after: Mapping[str, range]) -> str:
    came = [
        f"{state.nodes[peer].name} stands by with layers {span.start}–{span.stop - 1}"
        for peer, span in sorted(after.items())
        if before.get(peer) != span
    ]
    went = [f"{state.nodes[peer].name} stands by no more" for peer in sorted(before.keys() - after.keys())]
    return "; ".join(came + went)
