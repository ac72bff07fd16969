"""The operator's order to plan now (`atollctl plan apply`): builds the question and applies the answer. Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.live import planner_answer, planner_question, replan_trigger
from atoll.coordinator.live.attendance import attendance_of, membership_change
from atoll.coordinator.live.plan_issue import issue_replica_plan
from atoll.coordinator.planner.question import Answer, NamedRoute, Question
from atoll.coordinator.state.snapshot import Draft, Policy, State, Step, StepTime
from atoll.core.errors import InvalidTransition
from atoll.core.plan import Plan


def operator_question(state: State, now: StepTime, run_id: str, policy: Policy) -> Question:
    """Build the planner's question. Where all nodes hold all layers the routes are given, and only evaluated.

    Raises `InvalidTransition` while the run does not train.
    """
    run = state.runs[run_id]
    if run.state not in ("GENESIS", "TRAINING"):
        raise InvalidTransition(
            f"run {run_id!r} is {run.state.lower()}: only runs that train have plans", "see `atollctl run show`"
        )
    question = replace(planner_question.build_question(state, now, run_id, policy), number=0)  # others start at 1
    attendance = attendance_of(state, run_id, now.monotonic)
    if replan_trigger.needs_routes(state, run_id, attendance):
        return question
    last = len(question.layers.layers) - 1
    given_routes: tuple[NamedRoute, ...] = tuple(((state.nodes[peer].name, 0, last),) for peer in attendance.members)
    return replace(question, given_routes=given_routes)


def apply(state: State, now: StepTime, run_id: str, question: Question, answer: Answer) -> Step[Plan | None]:
    """Issue the plan of the answer and return it; None where the present plan stays."""
    if not question.given_routes:
        return planner_answer.accept_answer(state, now, run_id, question, answer, ordered=True)
    draft = Draft(state, now)
    plan = state.memory[run_id].plan
    attendance = attendance_of(state, run_id, now.monotonic)
    if plan is None or not attendance.members or attendance.members == plan.members:
        return draft.done(None)
    if state.runs[run_id].state != "TRAINING" or replan_trigger.needs_routes(state, run_id, attendance):
        return draft.done(None)  # changed since the question
    reason = f"{membership_change(state, plan.members, attendance.members)}; ordered by the operator"
    issue_replica_plan(draft, run_id, attendance.members, reason)
    return draft.done(draft.state.memory[run_id].plan)
