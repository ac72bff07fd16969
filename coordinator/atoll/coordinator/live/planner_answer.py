"""Handling of the planner's answers: an answer is dropped, prepared, or issued as the next plan. Pure.

A plan that moves layers is *prepared* first: nodes fetch their layers while the present plan continues
(`state/prefetch.py`). A plan whose members could not decide a round waits as a preparation too (`quorum_guard.py`).
Nodes without a place get the reason. Findings about nodes' figures are recorded. A claim that differs from measurements
is logged once, and shown while it lasts. The correction of a node's layer times is kept: after a trainer starts with
other layers, there is no measured time for a while, and the node's own claim must not be used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from atoll.coordinator.live import planner_question, standbys
from atoll.coordinator.live.attendance import Attendance, attendance_of, live_of, membership_change
from atoll.coordinator.live.pinning import pinned_span
from atoll.coordinator.live.plan_issue import PlanNotes, issue_route_plan
from atoll.coordinator.planner.plan_builder import Route, RoutePart, routes_of
from atoll.coordinator.planner.question import Answer, Question, has_planner_inputs, memory_figures
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.run_memory import AnsweredQuestion, Preparation
from atoll.coordinator.state.run_states import transition_run
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.core.plan import Plan

# times the wait for a node that did not fetch in time: how long no plan waits for that node again
_UNPREPARED_WAIT_FACTOR = 4.0


def accept_answer(
    state: State, now: StepTime, run_id: str, question: Question, answer: Answer, *, ordered: bool = False
) -> Step[Plan | None]:
    """Handle an answer, and return the plan that was issued, if any.

    `ordered`: the operator asked, so issue it at once.
    """
    draft = Draft(state, now)
    memory = state.memory[run_id]
    waits = memory.question is not None and memory.question.number == question.number
    if not waits and not ordered:
        return draft.done(None)
    if waits:
        draft.remember(run_id, question=None)
    attendance = attendance_of(state, run_id, now.monotonic)
    needs_plan = state.runs[run_id].state in ("GENESIS", "TRAINING")
    if not needs_plan or not _is_still_valid(state, run_id, question, answer, attendance):
        return draft.done(None)
    planning_inputs = memory.question_nodes if waits else _inputs_of_asked(state, question, attendance)
    draft.remember(run_id, answered_question=AnsweredQuestion(planning_inputs, now.monotonic), changed_since=None)
    record_findings(draft, run_id, question, answer)
    _report_infeasible(draft, run_id, answer.missing)
    if answer.missing:
        return draft.done(None)
    if set(answer.routes) == set(question.current) and not planner_question.may_follow_newer_plan(state, run_id):
        _report_left_out(draft, run_id, _left_out(state, attendance, question, answer, now.monotonic))
    elif ordered:
        _issue(draft, run_id, question, answer)
    elif not _prepare(draft, run_id, question, answer, attendance) and not _issue(draft, run_id, question, answer):
        waiting = Preparation(question, answer, {}, now.monotonic)  # waits for voters to return
        draft.remember(run_id, preparation=waiting)
    plan = draft.state.memory[run_id].plan
    return draft.done(plan if plan is not memory.plan else None)


def record_findings(draft: Draft, run_id: str, question: Question, answer: Answer) -> None:
    """Record doubts and corrections of the nodes in the question. Those of other nodes stay."""
    memory, peers = draft.state.memory[run_id], question.peer_by_name()
    found = {peers[name]: doubt for name, doubt in answer.doubts.items() if name in peers}
    for peer in sorted(found.keys() - memory.claim_doubts.keys()):
        draft.event("node.doubted", run_id, peer, f"{found[peer]}: the planner uses the measured value")
    asked = set(peers.values())
    claim_doubts = {peer: doubt for peer, doubt in memory.claim_doubts.items() if peer not in asked} | found
    corrections = {peers[name]: factor for name, factor in answer.corrections.items() if name in peers}
    draft.remember(run_id, claim_doubts=claim_doubts, corrections={**memory.corrections, **corrections})


def _inputs_of_asked(state: State, question: Question, attendance: Attendance) -> tuple[tuple[object, ...], ...]:
    """Planning inputs of the nodes in the operator's question. Nodes that joined since are in the next question."""
    asked = {node.peer_id for node in question.nodes}
    return tuple(item for item in planner_question.planning_inputs(state, attendance) if item[0] in asked)


def _is_still_valid(state: State, run_id: str, question: Question, answer: Answer, attendance: Attendance) -> bool:
    """True if the plan, and the nodes that the answer uses, have not changed since the question."""
    peers = _placed_peers(question, answer)
    names, plan = question.name_by_peer(), state.memory[run_id].plan
    pinned = all(it in state.nodes and pinned_span(state.nodes[it]) == question.pins.get(names[it]) for it in peers)
    as_asked = question.routes == (routes_of(plan) if plan is not None else ())
    return as_asked and pinned and not _changed(state, question, peers, attendance)


def _placed_peers(question: Question, answer: Answer) -> list[str]:
    """Peer ids of the nodes that the answer uses; all nodes of the question if it uses none."""
    peers = question.peer_by_name()
    return [peers[name] for name in {name for route in answer.routes for name, _, _ in route} or peers.keys()]


def _changed(state: State, question: Question, peers: Sequence[str], attendance: Attendance) -> list[str]:
    """Those of `peers` that are gone, or whose memory differs from the question's."""
    asked = {node.peer_id: memory_figures(node.profile) for node in question.nodes}
    return [
        peer
        for peer in peers
        if peer not in attendance.plannable or asked[peer] != memory_figures(live_of(state, peer).profile)
    ]


def continue_preparation(
    draft: Draft, run_id: str, policy: Policy, coming: Preparation, attendance: Attendance
) -> None:
    """Issue the prepared plan once its nodes are ready, or abandon it if that has become impossible."""
    state, memory = draft.state, draft.state.memory[run_id]
    waited = draft.now.monotonic - coming.since
    if not _is_still_valid(state, run_id, coming.question, coming.answer, attendance):
        changed = _changed(state, coming.question, _placed_peers(coming.question, coming.answer), attendance)
        newcomers = [peer for peer in changed if memory.plan and peer not in memory.plan.stages]
        _remember_unprepared(draft, run_id, newcomers, waited)
        names = ", ".join(state.nodes[peer].name for peer in changed)
        lost = f"{names} left or changed memory" if names else "the present plan or a pin changed"
        abandon_preparation(draft, run_id, lost)
        return
    fetching = prefetch.peers_still_fetching(state, coming)
    assert memory.plan is not None
    leaving = [peer for peer in attendance.finishing if not live_of(state, peer).handing_over]
    if not memory.plan.stages <= set(attendance.members) or not (fetching or leaving):
        _issue(draft, run_id, coming.question, coming.answer)
    elif refusing := [peer for peer in fetching if prefetch.reports_no_room(state, peer, coming.spans[peer])]:
        _abandon_because_of(draft, run_id, refusing, waited, "has no memory or disk space for the layers")
    elif fetching and waited >= prefetch.fetch_deadline_seconds(coming, policy.prepare_seconds):
        _abandon_because_of(draft, run_id, fetching, waited, "did not fetch the layers in time")


def _abandon_because_of(draft: Draft, run_id: str, peers: Sequence[str], waited: float, why: str) -> None:
    names = ", ".join(draft.state.nodes[peer].name for peer in peers)
    _remember_unprepared(draft, run_id, peers, waited)
    abandon_preparation(draft, run_id, f"{names} {why}")


def _prepare(draft: Draft, run_id: str, question: Question, answer: Answer, attendance: Attendance) -> bool:
    """Start to prepare the answer's plan. Returns False if no node must fetch layers, or the plan is urgent."""
    state, plan = draft.state, draft.state.memory[run_id].plan
    if (
        plan is None
        or not plan.stages <= set(attendance.members)
        or planner_question.may_follow_newer_plan(state, run_id)
    ):
        return False
    spans = prefetch.spans_to_fetch(plan, question, answer)
    if not spans and not attendance.finishing:
        return False
    draft.remember(run_id, preparation=Preparation(question, answer, spans, draft.now.monotonic))
    fetch = ", ".join(f"{state.nodes[peer].name} {_layers(span)}" for peer, span in sorted(spans.items()))
    draft.event("plan.preparing", run_id, run_id, f"before the next plan, nodes fetch their layers: {fetch or 'none'}")
    return True


def _remember_unprepared(draft: Draft, run_id: str, peers: Sequence[str], waited: float) -> None:
    """Record nodes that delayed a plan. For a while, newcomers get no place and members no other layers."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    until = now + max(planner_question.UNPREPARED_HOLD_SECONDS, _UNPREPARED_WAIT_FACTOR * waited)
    known = {peer: then for peer, then in memory.prepare_retry_at.items() if now < then}
    draft.remember(run_id, prepare_retry_at={**known, **dict.fromkeys(peers, until)})


def abandon_preparation(draft: Draft, run_id: str, why: str) -> None:
    """Abandon the plan that is being prepared."""
    draft.event("plan.abandoned", run_id, run_id, f"the next plan is abandoned: {why}")
    draft.remember(run_id, preparation=None, answered_question=None)


def _layers(span: range) -> str:
    return f"{span.start}-{span.stop - 1}" if len(span) > 1 else str(span.start)


def _issue(draft: Draft, run_id: str, question: Question, answer: Answer) -> bool:
    """Issue a plan with the routes of the answer. Names are those in the question, because nodes may have been renamed.

    Returns False without a plan if its members could not decide the next round.
    """
    state, now, plan = draft.state, draft.now.monotonic, draft.state.memory[run_id].plan
    attendance, peers = attendance_of(state, run_id, now), question.peer_by_name()
    left_out = _left_out(state, attendance, question, answer, now)
    routes: list[Route] = [
        tuple(RoutePart(peers[name], first, last) for name, first, last in route) for route in answer.routes
    ]
    standing = standbys.remaining_standbys(state, run_id, routes, attendance.plannable)
    members = sorted([*standing, *(part.peer_id for route in routes for part in route)])
    changed = membership_change(state, plan.members, members) if plan else ""
    notes = PlanNotes(answer.tokens_per_second, math.fsum(answer.fetched_bytes.values()), left_out)
    reason = "; ".join(filter(None, (changed, answer.reason)))
    if not issue_route_plan(draft, run_id, routes, reason, notes, standbys=standing):
        return False
    if state.runs[run_id].state == "GENESIS":
        transition_run(draft, run_id, "TRAINING", f"training starts with {len(members)} nodes")
    _report_left_out(draft, run_id, left_out)
    return True


def _left_out(state: State, attendance: Attendance, question: Question, answer: Answer, now: float) -> dict[str, str]:
    """Reasons, by peer id, why nodes were left out by the planner or not in the question."""
    placed = {name for route in answer.routes for name, _, _ in route}
    names = question.name_by_peer()
    return {
        peer: answer.left_out.get(names.get(peer, "")) or _why_not_in_question(state, peer, now)
        for peer in attendance.eligible
        if names.get(peer) not in placed
    }


def _why_not_in_question(state: State, peer: str, now: float) -> str:
    if planner_question.is_unprepared(state.memory[state.nodes[peer].run_id], peer, now):
        return "did not fetch its layers in time"
    known = has_planner_inputs(live_of(state, peer).profile)
    return "joined while the plan was made" if known else "has not reported its memory or speed"


def _report_left_out(draft: Draft, run_id: str, left_out: dict[str, str]) -> None:
    """Log each node that was left out, once, until it is in the plan again as a standby or on a route."""
    memory = draft.state.memory[run_id]
    members = memory.plan.members if memory.plan is not None else ()
    left_out = {peer: why for peer, why in left_out.items() if peer not in members}
    for peer in sorted(left_out.keys() - memory.left_out.keys()):
        name = draft.state.nodes[peer].name
        draft.event("node.left-out", run_id, peer, f"{name} has no place in the plan: {left_out[peer]}")
    draft.remember(run_id, left_out=left_out)
    if memory.figures is not None and left_out != memory.left_out:
        draft.set_figures(replace(memory.figures, left_out=json.dumps(left_out, sort_keys=True)))


def _report_infeasible(draft: Draft, run_id: str, missing: str) -> None:
    if missing and missing != draft.state.memory[run_id].no_plan_reason:
        draft.event("plan.impossible", run_id, run_id, f"no plan is possible: {missing}")
    draft.remember(run_id, no_plan_reason=missing)
