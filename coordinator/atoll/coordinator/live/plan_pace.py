"""Predicted and measured pace of the current plan, stored with its figures. Pure.

The measured pace is the mean of tokens per second since the plan was issued. A route's tokens are those that its driver
reports. Time counts only while every driver is connected and follows the plan, so neither a change of plans nor a
restart of the coordinator looks like slow training.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.live import planner_answer, planner_question
from atoll.coordinator.planner.question import Answer, Question, has_planner_inputs
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.coordinator.store.records import PlanFigures
from atoll.core.plan import Plan

SAMPLE_SECONDS = 5.0
PERSIST_INTERVAL_SECONDS = 60.0  # of measured time between two writes of the mean
MOST_TOKENS_PER_SECOND = 1e12  # a higher report is reduced to this, because sums of huge floats overflow
MAX_PREDICTED_MEMBERS = 256  # a larger replica plan gets no prediction, because that takes too long


def sample_pace(draft: Draft, run_id: str) -> None:
    """Take a sample when one is due, and write the mean to the store from time to time."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    plan, figures = memory.plan, memory.figures
    if plan is None or figures is None or figures.version != plan.version:
        return
    since = memory.sampled_at
    if since is not None and now - since < SAMPLE_SECONDS:
        return
    draft.remember(run_id, sampled_at=now)
    rate = trained_tokens_per_second(draft.state, plan)
    if since is not None and rate:
        after = _with_sample(figures, rate, min(now - since, 2 * SAMPLE_SECONDS))
        due = after.measured_seconds // PERSIST_INTERVAL_SECONDS > figures.measured_seconds // PERSIST_INTERVAL_SECONDS
        draft.set_figures(after) if due else draft.remember(run_id, figures=after)


def trained_tokens_per_second(state: State, plan: Plan) -> float:
    """Sum of the drivers' tokens per second; 0 unless all of them follow this plan now."""
    rates = []
    for route in plan.routes:
        live = state.live.get(route[0])
        if live is None or not live.connected or live.status.plan_version != plan.version:
            return 0.0
        rates.append(min(live.status.tokens_per_second, MOST_TOKENS_PER_SECOND))
    return sum(rates)


def ask_prediction(draft: Draft, run_id: str, policy: Policy) -> None:
    """Ask the planner once for the pace of a replica plan, after all members have reported their profiles.

    Route plans have a prediction already, from the search.
    """
    memory, state = draft.state.memory[run_id], draft.state
    plan, figures = memory.plan, memory.figures
    if plan is None or figures is None or memory.question is not None or memory.predicted_version == plan.version:
        return
    if figures.predicted_tokens_per_second or len(plan.members) > MAX_PREDICTED_MEMBERS:
        return
    lives = [state.live.get(peer) for peer in plan.members]
    if not all(live is not None and has_planner_inputs(live.profile) for live in lives):
        return
    question = planner_question.build_question(state, draft.now, run_id, policy)
    nodes = tuple(node for node in question.nodes if node.peer_id in plan.members)
    if len(nodes) == len(plan.members):
        draft.remember(
            run_id,
            question=replace(question, nodes=nodes, given_routes=question.current),
            questions_asked=question.number,
            predicted_version=plan.version,
        )


def take_prediction(state: State, now: StepTime, run_id: str, question: Question, answer: Answer) -> Step[None]:
    """Store the predicted pace, if the plan is still the same."""
    draft, memory = Draft(state, now), state.memory[run_id]
    if memory.question is None or memory.question.number != question.number:
        return draft.done(None)
    draft.remember(run_id, question=None)
    planner_answer.record_findings(draft, run_id, question, answer)
    unchanged = planner_question.routes_by_name(state, memory.plan) == question.given_routes
    if unchanged and memory.figures is not None and answer.tokens_per_second:
        draft.set_figures(replace(memory.figures, predicted_tokens_per_second=answer.tokens_per_second))
    return draft.done(None)


def _with_sample(figures: PlanFigures, rate: float, seconds: float) -> PlanFigures:
    total = figures.measured_seconds + seconds
    mean = figures.measured_tokens_per_second + (rate - figures.measured_tokens_per_second) * seconds / total
    return replace(figures, measured_tokens_per_second=mean, measured_seconds=total)
