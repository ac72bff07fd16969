"""The operator's order to plan now: what is asked, and what is done with the answer. Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.live import planner_answer, planner_question, replan_trigger
from atoll.coordinator.live.attendance import difference, present
from atoll.coordinator.live.plan_issue import issue
from atoll.coordinator.planner.question import Answer, NamedRoute, Question
from atoll.coordinator.state.snapshot import Draft, Moment, Policy, State, Step
from atoll.core.errors import InvalidTransition
from atoll.core.plan import Plan


def question_of(state: State, now: Moment, run_id: str, policy: Policy) -> Question:
    """What to ask the planner. Where all hold everything the plan is known, and only its worth is asked.

    Raises `InvalidTransition` while the run does not train.
    """
    run = state.runs[run_id]
    if run.state not in ("GENESIS", "TRAINING"):
        raise InvalidTransition(
            f"run {run_id!r} is {run.state.lower()}: plans are made for runs that train", "see `atollctl run show`"
        )
    question = replace(
        planner_question.ask(state, now, run_id, policy), number=0
    )  # the machine's own questions have others
    here = present(state, run_id, now.monotonic)
    if replan_trigger.needs_routes(state, run_id, here):
        return question
    last = len(question.layers.layers) - 1
    wanted: tuple[NamedRoute, ...] = tuple(((state.nodes[peer].name, 0, last),) for peer in here.members)
    return replace(question, wanted=wanted)


def apply(state: State, now: Moment, run_id: str, question: Question, answer: Answer) -> Step[Plan | None]:
    """The plan that was issued; None where the present one stays."""
    if not question.wanted:
        return planner_answer.take(state, now, run_id, question, answer, ordered=True)
    draft = Draft(state, now)
    plan = state.memory[run_id].plan
    here = present(state, run_id, now.monotonic)
    if plan is None or not here.members or here.members == plan.members:
        return draft.done(None)
    if state.runs[run_id].state != "TRAINING" or replan_trigger.needs_routes(state, run_id, here):  # since it was asked
        return draft.done(None)
    issue(draft, run_id, here.members, f"{difference(state, plan.members, here.members)}; the operator did not wait")
    return draft.done(draft.state.memory[run_id].plan)
