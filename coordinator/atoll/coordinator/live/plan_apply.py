"""The operator's order to plan now (`atollctl plan apply`): builds the question and applies the answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.coordinator.live import planner_answer, planner_question, quorum_guard, replan_trigger
from atoll.coordinator.live.attendance import attendance_of, membership_change
from atoll.coordinator.live.plan_issue import issue_replica_plan
from atoll.coordinator.planner.question import Answer, NamedRoute, Question
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.core.errors import InvalidTransition
from atoll.core.plan import Plan


def operator_question(state: State, now: StepTime, run_id: str, policy: Policy) -> Question:
    """Build the planner's question. If all nodes hold all layers, the routes are given and only evaluated.

    Raises `InvalidTransition` while the run does not train.
    """
    run = state.runs[run_id]
    if run.state not in ("GENESIS", "TRAINING"):
        raise InvalidTransition(
            f"run {run_id!r} is {run.state.lower()}: only runs that train have plans", "see `atollctl run show`"
        )
    # the questions of the state machine start at 1
    question = replace(planner_question.build_question(state, now, run_id, policy), number=0)
    attendance = attendance_of(state, run_id, now.monotonic)
    if replan_trigger.needs_routes(state, run_id, attendance):
        return question
    last = len(question.layers.layers) - 1
    given_routes: tuple[NamedRoute, ...] = tuple(((state.nodes[peer].name, 0, last),) for peer in attendance.members)
    return replace(question, given_routes=given_routes)


def apply(state: State, now: StepTime, run_id: str, question: Question, answer: Answer) -> Step[Plan | None]:
    """Issue the plan of the answer and return it; None if the current plan stays.

    Raises `InvalidTransition` if no quorum could decide a round under the new plan.
    """
    lookup.run(state, run_id)  # the run may have been deleted since the question
    if not question.given_routes:
        step = planner_answer.accept_answer(state, now, run_id, question, answer, ordered=True)
        if step.result is None:
            _require_decidable(step.state, run_id)
        return step
    return _apply_replicas(state, now, run_id)


def _apply_replicas(state: State, now: StepTime, run_id: str) -> Step[Plan | None]:
    draft = Draft(state, now)
    plan = state.memory[run_id].plan
    attendance = attendance_of(state, run_id, now.monotonic)
    if plan is None or not attendance.members or _is_present_plan(state, plan, attendance.members):
        return draft.done(None)
    if state.runs[run_id].state != "TRAINING" or replan_trigger.needs_routes(state, run_id, attendance):
        return draft.done(None)  # the run changed since the question
    reason = f"{membership_change(state, plan.members, attendance.members)}; ordered by the operator"
    if not issue_replica_plan(draft, run_id, attendance.members, reason):
        _require_decidable(draft.state, run_id)
    return draft.done(draft.state.memory[run_id].plan)


def _is_present_plan(state: State, plan: Plan, members: Sequence[str]) -> bool:
    """True if a plan of these replicas, with the voters that it must keep, equals the current one."""
    voters = quorum_guard.voters_to_keep(state, plan.run_id, dict.fromkeys(members, range(plan.layers)))
    return plan.stages == set(members) and set(plan.standbys) == voters.keys()


def _require_decidable(state: State, run_id: str) -> None:
    reason = state.memory[run_id].undecidable_reason
    if reason:
        raise InvalidTransition(f"the plan was not issued: {reason}", "see `atollctl node list`")
