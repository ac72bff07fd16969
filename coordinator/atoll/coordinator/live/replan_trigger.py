"""Decides when to ask the planner for a plan with routes. Pure.

If a node cannot hold the whole model, or the operator pinned layers, the search for a layout takes seconds. So the
state machine only records a *question* (`RunMemory.question`). The controller lets the planner answer it on another
thread and passes the answer to `planner_answer.accept_answer`. If a node that the answer uses has left, has less
memory or was pinned meanwhile, the answer is dropped and a new question is asked. Nodes that joined meanwhile wait for
the next question. There is one question, or one plan in preparation, at a time. A lost stage whose layers another node
holds is replaced at once, without the planner (`stage_take_over.py`). The planner is asked when the next plan is due
(`plan_spacing.py`), so that it sees all changes since the last one.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

from atoll.coordinator.live import (
    neighbour_copies,
    plan_issue,
    plan_spacing,
    planner_answer,
    planner_question,
    stage_take_over,
    standbys,
)
from atoll.coordinator.live.attendance import Attendance, live_of
from atoll.coordinator.live.pinning import pinned_span
from atoll.coordinator.live.probation import probation_changed, probation_text
from atoll.coordinator.live.span_fit import span_memory_of
from atoll.coordinator.planner.plan_builder import routes_of
from atoll.coordinator.planner.reduce_shares import MIN_RESHARE_SPEEDUP, span_rates, span_reshare_speedup
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.snapshot import Policy, State
from atoll.core.plan import Plan

if TYPE_CHECKING:
    from atoll.coordinator.planner.span_memory import SpanMemory

_LINK_CHECK_INTERVAL_SECONDS = 10.0  # between checks whether new reduce shares would be faster


class ReplanReason(StrEnum):
    """Reason why a new plan is due, kept in `RunMemory.changed_why` while it is debounced."""

    FIRST = "first"  # there is no plan
    MEMBERS = "members"  # the nodes or their memory changed
    DRIFT = "drift"  # the last answer is old
    REACH = "reach"  # a reducer cannot be dialled any more
    LINKS = "links"  # other reduce shares would be faster
    PROBATION = "probation"  # other members are on probation than in the plan


_NOT_URGENT = (ReplanReason.LINKS, ReplanReason.PROBATION)


def needs_routes(state: State, run_id: str, attendance: Attendance) -> bool:
    """True if a member cannot hold all layers, or is pinned to some."""
    model = span_memory_of(state, run_id)
    if model is None:
        return False
    plan = state.memory[run_id].plan
    return any(
        pinned_span(state.nodes[peer]) is not None or not _holds_all(state, model, plan, peer)
        for peer in attendance.members
    )


def update_routes(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> None:
    """Ask the planner once its inputs have differed from the last question's for the debounce time."""
    if stage_take_over.take_over(draft, run_id, policy, attendance):
        return
    neighbour_copies.drop_unusable_copies(draft, run_id)
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if memory.preparation is not None:
        if stage_take_over.is_set_aside_copy_needed(draft.state, run_id, attendance, now):
            planner_answer.abandon_preparation(draft, run_id, "a stage is gone whose copy is set aside for this plan")
        else:
            planner_answer.continue_preparation(draft, run_id, policy, memory.preparation, attendance)
        return
    if memory.question is not None or _has_unreturned_member(draft.state, attendance):
        return
    _check_links(draft, run_id)
    memory = draft.state.memory[run_id]
    why = _replan_reason(draft.state, run_id, policy, attendance, now)
    if why is None:
        if memory.changed_since is not None:
            draft.remember(run_id, changed_since=None)
        standbys.update_standbys(draft, run_id, policy, attendance)
        neighbour_copies.update_copies(draft, run_id, policy, attendance)
    elif now < memory.no_question_before and _is_whole(memory.plan, attendance):
        return
    elif memory.changed_since is None or memory.changed_why != why:
        draft.remember(run_id, changed_since=now, changed_why=why)
    elif now - memory.changed_since < _debounce_seconds(why, policy) or not plan_spacing.may_issue(
        draft.state, run_id, policy, attendance, now
    ):
        return
    elif why in (ReplanReason.LINKS, ReplanReason.PROBATION):
        _reissue_same_routes(draft, run_id, why)
    else:
        question = planner_question.build_question(draft.state, draft.now, run_id, policy)
        planning_inputs = planner_question.planning_inputs(draft.state, attendance)
        draft.remember(run_id, question=question, questions_asked=question.number, question_nodes=planning_inputs)


# --- when to ask -------------------------------------------------------------------------------------


def _debounce_seconds(why: ReplanReason, policy: Policy) -> float:
    """Seconds for which a reason must persist; the first plan is asked for at once."""
    special = {ReplanReason.FIRST: 0.0, **dict.fromkeys(_NOT_URGENT, policy.reshare_after_seconds)}
    return special.get(why, policy.debounce_seconds)


def _replan_reason(
    state: State, run_id: str, policy: Policy, attendance: Attendance, now: float
) -> ReplanReason | None:
    memory = state.memory[run_id]
    answered_question = memory.answered_question
    if (
        answered_question is None
        or answered_question.nodes != planner_question.planning_inputs(state, attendance)
        or planner_question.may_follow_newer_plan(state, run_id)
    ):
        return ReplanReason.FIRST if memory.plan is None else ReplanReason.MEMBERS
    if now - answered_question.at >= policy.replan_seconds:
        return ReplanReason.DRIFT
    if memory.plan is None or memory.no_plan_reason:
        return None
    if probation_changed(state, memory.plan):
        return ReplanReason.PROBATION
    return ReplanReason.LINKS if memory.new_shares_pay else None


def _is_whole(plan: Plan | None, attendance: Attendance) -> bool:
    """True if all stages are present and none is draining."""
    return plan is not None and plan.stages <= set(attendance.members) and not attendance.finishing


def _has_unreturned_member(state: State, attendance: Attendance) -> bool:
    """True while a member has not reported since the coordinator started. It returns or is lost within seconds."""
    return any(not live_of(state, peer).profile.device for peer in attendance.awaited)


def _check_links(draft: Draft, run_id: str) -> None:
    """Check at intervals whether new shares would be faster, because the check is slow and shares are not urgent."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    looked = memory.shares_checked_at
    if memory.plan is not None and (looked is None or now - looked >= _LINK_CHECK_INTERVAL_SECONDS):
        pays = _new_shares_pay(draft.state, memory.plan)
        draft.remember(run_id, shares_checked_at=now, new_shares_pay=pays)


def _new_shares_pay(state: State, plan: Plan) -> bool:
    reducers = plan.without_probation(plan.stages) or plan.stages
    spans = {peer: span for peer, span in plan_issue.spans_of(plan).items() if peer in reducers}
    links = plan_issue.reported_links(state, spans)
    now = span_reshare_speedup(links, spans, plan_issue.reduce_rates(plan))
    new_rates = span_rates(links, spans, plan_issue.layer_weights(state.runs[plan.run_id]))
    best = span_reshare_speedup(links, spans, new_rates)  # may exceed 1, because a node has one rate for all its layers
    return now > MIN_RESHARE_SPEEDUP * best and math.isfinite(best)


def _reissue_same_routes(draft: Draft, run_id: str, why: ReplanReason) -> None:
    """Issue the same routes with new reduce shares and the current probation."""
    plan = draft.state.memory[run_id].plan
    assert plan is not None
    standing = standbys.standby_spans(plan)
    reason = plan_issue.RESHARE_REASON if why is ReplanReason.LINKS else probation_text(draft.state, plan)
    standbys.issue_with_standbys(draft, run_id, routes_of(plan), standing, reason)
    draft.remember(run_id, new_shares_pay=False)


def _holds_all(state: State, model: SpanMemory, plan: Plan | None, peer: str) -> bool:
    """True if a node can hold all layers. Before it reports its memory: True if the plan gives it all layers.

    So a restart of the coordinator does not make a node appear larger.
    """
    profile, planned = live_of(state, peer).profile, plan.assignment(peer) if plan else None
    if not profile.device_memory_bytes and planned is not None:
        return (planned.first_layer, planned.last_layer) == (0, model.layers - 1)
    return model.holds_all(profile)
