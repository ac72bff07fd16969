"""Plans with routes: when the planner is asked. Pure.

Where some node cannot hold the whole model, or the operator pinned layers, who holds what is a search of seconds. So
the machine only writes down a *question* (`RunMemory.question`); whoever runs the machine has it answered elsewhere and
brings the answer back (`answering.take`). An answer that uses a node that is gone, shrank or was pinned meanwhile is
dropped, and the question asked anew; nodes that came meanwhile wait for the next one. One question, or one preparation
of a plan, at a time. Stages that are gone are not waited for where somebody has their layers (`standbys`,
`second_copies`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from atoll.coordinator.live import (
    neighbour_copies as second_copies,
)
from atoll.coordinator.live import plan_issue, standbys
from atoll.coordinator.live import (
    planner_answer as answering,
)
from atoll.coordinator.live import (
    planner_question as asking,
)
from atoll.coordinator.live.attendance import Attendance
from atoll.coordinator.live.pinning import pinned_span
from atoll.coordinator.live.plan_issue import PlanNotes, issue_route_plan
from atoll.coordinator.live.span_fit import span_memory_of
from atoll.coordinator.planner.plan_builder import routes_of
from atoll.coordinator.planner.reduce_shares import MIN_RESHARE_SPEEDUP, span_rates, span_reshare_speedup
from atoll.coordinator.state.snapshot import Draft, Policy, State
from atoll.core.plan import Plan

if TYPE_CHECKING:
    from atoll.coordinator.planner.span_memory import SpanMemory

_LINK_CHECK_INTERVAL_SECONDS = 10.0  # between looks at whether other shares of reducing would pay


def needs_routes(state: State, run_id: str, attendance: Attendance) -> bool:
    """Whether somebody cannot hold everything, or is pinned to layers."""
    model = span_memory_of(state, run_id)
    if model is None:
        return False
    plan = state.memory[run_id].plan
    return any(
        pinned_span(state.nodes[peer]) is not None or not _holds_all(state, model, plan, peer)
        for peer in attendance.members
    )


def follow(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> None:
    """Ask when what is known differs from what was asked about last and stays so for the debounce."""
    if standbys.take_over(draft, run_id, attendance) or second_copies.take_over(draft, run_id, attendance):
        return
    second_copies.drop_unusable_copies(draft, run_id)
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if memory.preparation is not None:
        if second_copies.is_set_aside_copy_needed(draft.state, run_id, attendance, now):
            answering.abandon_preparation(
                draft, run_id, "a stage is gone whose layers somebody has who prepares for it"
            )
        else:
            answering.continue_preparation(draft, run_id, policy, memory.preparation, attendance)
        return
    if memory.question is not None or _has_unreturned_member(draft.state, run_id, attendance):
        return
    _check_links(draft, run_id)
    memory = draft.state.memory[run_id]
    why = _replan_reason(draft.state, run_id, policy, attendance, now)
    if not why:
        if memory.changed_since is not None:
            draft.remember(run_id, changed_since=None)
        standbys.follow(draft, run_id, policy, attendance)
        second_copies.follow(draft, run_id, policy, attendance)
    elif now < memory.no_question_before and _is_whole(memory.plan, attendance):
        return
    elif memory.changed_since is None or memory.changed_why != why:
        draft.remember(run_id, changed_since=now, changed_why=why)
    elif now - memory.changed_since < _debounce_seconds(why, policy):
        return
    elif why == "links":
        _reissue_with_new_shares(draft, run_id)
    else:
        question = asking.build_question(draft.state, draft.now, run_id, policy)
        planning_inputs = asking.planning_inputs(draft.state, run_id, attendance)
        draft.remember(run_id, question=question, questions=question.number, question_nodes=planning_inputs)


# --- when to ask -------------------------------------------------------------------------------------


def _debounce_seconds(why: str, policy: Policy) -> float:
    """For how many seconds that must have been so. Nobody waits for the first plan."""
    return {"first": 0.0, "links": policy.reshare_after_seconds}.get(why, policy.debounce_seconds)


def _replan_reason(state: State, run_id: str, policy: Policy, attendance: Attendance, now: float) -> str:
    memory = state.memory[run_id]
    answered_question = memory.answered_question
    if (
        answered_question is None
        or answered_question.nodes != asking.planning_inputs(state, run_id, attendance)
        or asking.may_follow_newer_plan(state, run_id)
    ):
        return "first" if memory.plan is None else "members"
    if now - answered_question.at >= policy.replan_seconds:
        return "drift"
    return "links" if memory.new_shares_pay and not memory.missing else ""


def _is_whole(plan: Plan | None, attendance: Attendance) -> bool:
    """Whether all stages are there, and nobody is about to go."""
    return plan is not None and plan.stages <= set(attendance.members) and not attendance.finishing


def _has_unreturned_member(state: State, run_id: str, attendance: Attendance) -> bool:
    """Whether a member of the plan has not come back since the coordinator started: it will, or be lost, in seconds."""
    return any(not asking.live_of(state, peer).profile.device for peer in attendance.awaited)


def _check_links(draft: Draft, run_id: str) -> None:
    """Now and then: it takes a while where members are many, and shares follow slowly anyway."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    looked = memory.shares_checked_at
    if memory.plan is not None and (looked is None or now - looked >= _LINK_CHECK_INTERVAL_SECONDS):
        pays = _new_shares_pay(draft.state, memory.plan)
        draft.remember(run_id, shares_checked_at=now, new_shares_pay=pays)


def _new_shares_pay(state: State, plan: Plan) -> bool:
    told, spans, planned = (
        plan_issue.reported_links(state, plan.stages),
        plan_issue.spans_of(plan),
        plan_issue.reduce_rates(plan),
    )
    now = span_reshare_speedup(told, spans, planned)
    best = span_reshare_speedup(told, spans, span_rates(told, spans, plan_issue.layer_weights(state.runs[plan.run_id])))
    return now > MIN_RESHARE_SPEEDUP * best and math.isfinite(best)


def _reissue_with_new_shares(draft: Draft, run_id: str) -> None:
    """The same routes, in which others reduce."""
    memory = draft.state.memory[run_id]
    assert memory.plan is not None
    predicted = memory.figures.predicted_tokens_per_second if memory.figures else 0.0
    notes = PlanNotes(predicted, 0.0, memory.left_out)
    reason = "who reduces how much follows what nodes say of their links"
    spans = {peer: memory.plan.span(peer) for peer in memory.plan.standbys}
    issue_route_plan(draft, run_id, routes_of(memory.plan), reason, notes, standbys=spans)
    draft.remember(run_id, new_shares_pay=False)


def _holds_all(state: State, model: SpanMemory, plan: Plan | None, peer: str) -> bool:
    """Of who told nothing yet, as the plan has it: a restart makes nobody larger."""
    profile, planned = asking.live_of(state, peer).profile, plan.assignment(peer) if plan else None
    if not profile.device_memory_bytes and planned is not None:
        return (planned.first_layer, planned.last_layer) == (0, model.layers - 1)
    return model.holds_all(profile)
