"""What becomes of the planner's answer: dropped, prepared, issued; who has no part in it is told why. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from atoll.coordinator.live import planner_question, profile_doubts, standbys
from atoll.coordinator.live.attendance import Attendance, attendance_of, membership_change
from atoll.coordinator.live.pinning import pinned_span
from atoll.coordinator.live.plan_issue import PlanNotes, issue_route_plan
from atoll.coordinator.planner.plan_builder import Route, RoutePart, routes_of
from atoll.coordinator.planner.question import Answer, Question, has_planner_inputs, memory_figures
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.run_states import transition_run
from atoll.coordinator.state.snapshot import AnsweredQuestion, Draft, Policy, Preparation, State, Step, StepTime
from atoll.core.plan import Plan

_UNPREPARED_WAIT_FACTOR = 4.0  # for which nobody waits again for who was waited for in vain


def take(
    state: State, now: StepTime, run_id: str, question: Question, answer: Answer, *, ordered: bool = False
) -> Step[Plan | None]:
    """The planner answered: the plan that was issued, if any. `ordered`: by the operator, who is not kept waiting."""
    draft = Draft(state, now)
    memory = state.memory[run_id]
    waits = memory.question is not None and memory.question.number == question.number
    if not waits and not ordered:
        return draft.done(None)
    if waits:
        draft.remember(run_id, question=None)
    attendance = attendance_of(state, run_id, now.monotonic)
    goes_on = state.runs[run_id].state in ("GENESIS", "TRAINING")
    if not goes_on or not _is_still_valid(state, run_id, question, answer, attendance):
        return draft.done(None)
    planning_inputs = memory.question_nodes if waits else _about_asked(state, run_id, question, attendance)
    draft.remember(run_id, answered_question=AnsweredQuestion(planning_inputs, now.monotonic), changed_since=None)
    profile_doubts.record_findings(draft, run_id, question, answer)
    _report_infeasible(draft, run_id, answer.missing)
    if answer.missing:
        return draft.done(None)
    if set(answer.routes) == set(question.current) and not planner_question.may_follow_newer_plan(state, run_id):
        _report_left_out(draft, run_id, _left_out(state, attendance, question, answer, now.monotonic))
    elif ordered or not _prepare(draft, run_id, question, answer, attendance):
        _issue(draft, run_id, question, answer)
    plan = draft.state.memory[run_id].plan
    return draft.done(plan if plan is not memory.plan else None)


def _about_asked(
    state: State, run_id: str, question: Question, attendance: Attendance
) -> tuple[tuple[object, ...], ...]:
    """What the operator's question was about: who came after it was asked is looked at by the next one."""
    asked = {node.peer_id for node in question.nodes}
    return tuple(item for item in planner_question.planning_inputs(state, run_id, attendance) if item[0] in asked)


def _is_still_valid(state: State, run_id: str, question: Question, answer: Answer, attendance: Attendance) -> bool:
    """Whether those that the answer gives a part are as they were when it was asked for."""
    peers = _placed_peers(question, answer)
    names, plan = question.name_by_peer(), state.memory[run_id].plan
    pinned = all(pinned_span(state.nodes[it]) == question.pins.get(names[it]) for it in peers)
    as_asked = question.routes == (routes_of(plan) if plan is not None else ())
    return as_asked and pinned and not _changed(state, question, peers, attendance)


def _placed_peers(question: Question, answer: Answer) -> list[str]:
    """Peer ids of those that the answer gives a part; where it gives none, of all."""
    peers = question.peer_by_name()
    return [peers[name] for name in {name for route in answer.routes for name, _, _ in route} or peers.keys()]


def _changed(state: State, question: Question, peers: Sequence[str], attendance: Attendance) -> list[str]:
    """Of these, who is gone or has other memory than when it was asked."""
    planning_inputs, able = (
        {node.peer_id: memory_figures(node.profile) for node in question.nodes},
        {*attendance.eligible, *attendance.awaited},
    )
    return [
        it
        for it in peers
        if it not in able or planning_inputs[it] != memory_figures(planner_question.live_of(state, it).profile)
    ]


def continue_preparation(
    draft: Draft, run_id: str, policy: Policy, coming: Preparation, attendance: Attendance
) -> None:
    """The next plan is prepared: issue it when that is done, or end it when it cannot be."""
    state, memory = draft.state, draft.state.memory[run_id]
    waited = draft.now.monotonic - coming.since
    if not _is_still_valid(state, run_id, coming.question, coming.answer, attendance):
        changed = _changed(state, coming.question, _placed_peers(coming.question, coming.answer), attendance)
        _remember_unprepared(
            draft, run_id, [it for it in changed if memory.plan and it not in memory.plan.stages], waited
        )
        abandon_preparation(draft, run_id, "somebody whom it needs is gone or changed")
        return
    peers_still_fetching = prefetch.peers_still_fetching(state, coming)
    assert memory.plan is not None
    going = [peer for peer in attendance.finishing if not planner_question.live_of(state, peer).handing_over]
    if not memory.plan.stages <= set(attendance.members) or not (peers_still_fetching or going):
        _issue(draft, run_id, coming.question, coming.answer)
    elif refusing := [
        peer for peer in peers_still_fetching if prefetch.reports_no_room(state, peer, coming.spans[peer])
    ]:
        _give_up_on(draft, run_id, refusing, waited, "found no room for the layers")
    elif peers_still_fetching and waited >= prefetch.fetch_deadline_seconds(coming, policy.prepare_seconds):
        _give_up_on(draft, run_id, peers_still_fetching, waited, "did not fetch the layers in time")


def _give_up_on(draft: Draft, run_id: str, peers: Sequence[str], waited: float, why: str) -> None:
    names = ", ".join(draft.state.nodes[peer].name for peer in peers)
    _remember_unprepared(draft, run_id, peers, waited)
    abandon_preparation(draft, run_id, f"{names} {why}")


def _prepare(draft: Draft, run_id: str, question: Question, answer: Answer, attendance: Attendance) -> bool:
    """Let nodes fetch what this answer gives them; False where nobody has to, or nobody should wait for it."""
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
    """Who kept a plan from being issued: newcomers are given nothing for much longer, members no other layers."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    until = now + max(planner_question.UNPREPARED_HOLD_SECONDS, _UNPREPARED_WAIT_FACTOR * waited)
    known = {peer: then for peer, then in memory.prepare_retry_at.items() if now < then}
    draft.remember(run_id, prepare_retry_at={**known, **dict.fromkeys(peers, until)})


def abandon_preparation(draft: Draft, run_id: str, why: str) -> None:
    """Give up the plan that is prepared."""
    draft.event("plan.abandoned", run_id, run_id, f"the plan that was being prepared is given up: {why}")
    draft.remember(run_id, preparation=None, answered_question=None)


def _layers(span: range) -> str:
    return f"{span.start}-{span.stop - 1}" if len(span) > 1 else str(span.start)


def _issue(draft: Draft, run_id: str, question: Question, answer: Answer) -> None:
    """The routes of the answer; its names are those of the question, whatever nodes are called by now."""
    state, now, plan = draft.state, draft.now.monotonic, draft.state.memory[run_id].plan
    left_out, peers = (
        _left_out(state, attendance_of(state, run_id, now), question, answer, now),
        question.peer_by_name(),
    )
    routes: list[Route] = [
        tuple(RoutePart(peers[name], first, last) for name, first, last in route) for route in answer.routes
    ]
    attendance = attendance_of(state, run_id, now)
    standing = standbys.kept(state, run_id, routes, [*attendance.eligible, *attendance.awaited])
    members = sorted([*standing, *(part.peer_id for route in routes for part in route)])
    changed = membership_change(state, plan.members, members) if plan else ""
    notes = PlanNotes(answer.tokens_per_second, math.fsum(answer.fetched_bytes.values()), left_out)
    reason = "; ".join(filter(None, (changed, answer.reason)))
    issue_route_plan(draft, run_id, routes, reason, notes, standbys=standing)
    if state.runs[run_id].state == "GENESIS":
        transition_run(draft, run_id, "TRAINING", f"training begins with {len(members)} nodes")
    _report_left_out(draft, run_id, left_out)


def _left_out(state: State, attendance: Attendance, question: Question, answer: Answer, now: float) -> dict[str, str]:
    """By peer id: those that the planner left out, and those that it was not asked about."""
    placed = {name for route in answer.routes for name, _, _ in route}
    names = question.name_by_peer()
    return {
        peer: answer.left_out.get(names.get(peer, "")) or _why_not_asked_about(state, peer, now)
        for peer in attendance.eligible
        if names.get(peer) not in placed
    }


def _why_not_asked_about(state: State, peer: str, now: float) -> str:
    if planner_question.is_unprepared(state.memory[state.nodes[peer].run_id], peer, now):
        return "did not fetch its layers in time"
    known = has_planner_inputs(planner_question.live_of(state, peer).profile)
    return "joined while the plan was made" if known else "has not told its memory"


def _report_left_out(draft: Draft, run_id: str, left_out: dict[str, str]) -> None:
    """Each once, until it has a part, be it to stand by."""
    memory = draft.state.memory[run_id]
    members = memory.plan.members if memory.plan is not None else ()
    left_out = {peer: why for peer, why in left_out.items() if peer not in members}
    for peer in sorted(left_out.keys() - memory.left_out.keys()):
        name = draft.state.nodes[peer].name
        draft.event("node.left-out", run_id, peer, f"{name} has no part in the plan: {left_out[peer]}")
    draft.remember(run_id, left_out=left_out)
    if memory.figures is not None and left_out != memory.left_out:
        draft.set_figures(replace(memory.figures, left_out=json.dumps(left_out, sort_keys=True)))


def _report_infeasible(draft: Draft, run_id: str, missing: str) -> None:
    if missing and missing != draft.state.memory[run_id].missing:
        draft.event("plan.impossible", run_id, run_id, f"no plan is possible: {missing}")
    draft.remember(run_id, missing=missing)
