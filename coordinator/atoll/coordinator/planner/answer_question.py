"""The planner's entry point for a running swarm: computes the `Answer` to a `Question`.

It builds the problem from the nodes' figures, searches (or evaluates the given routes), and translates the result back
to node names. Pure except for the clock passed in.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from dataclasses import replace

from atoll.coordinator.planner.checks import check_problem, without_unfit_pins
from atoll.coordinator.planner.explain import left_out
from atoll.coordinator.planner.problem import Pin, Problem, read_layers
from atoll.coordinator.planner.problem_from_nodes import NodeProblem, problem_from_nodes, wishes_of
from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.planner.replan import ReplanResult, assess_layout, named_routes, replan
from atoll.core.clock import Clock
from atoll.core.errors import ConfigError, NoFeasiblePlan

# limit on (nodes explained as left out) × (all nodes): each explanation evaluates whole layouts
_LEFT_OUT_EVALUATIONS = 2000


def answer_question(question: Question, clock: Clock) -> Answer:
    """Search within the question's time and step limits. Raises nothing: `Answer.missing` describes the problem."""
    pins = tuple(Pin(name, span) for name, span in sorted(question.pins.items()))
    layers = read_layers(question.layers, question.spec.data.sequence_length)
    nodes_problem = problem_from_nodes(question.nodes, layers, question.spec, wishes_of(question.preferences, pins))
    unfit: dict[str, str] = {}
    try:
        check_problem(nodes_problem.problem)
        problem, unfit = without_unfit_pins(nodes_problem.problem)
        if question.given_routes:
            change = assess_layout(problem, question.current, question.given_routes, question.standbys)
        else:
            change = _replanned(problem, question, clock)
    except ConfigError as error:  # an invalid input, or no feasible plan
        why = "; ".join((str(error), *nodes_problem.refused.values(), *unfit.values()))
        missing = f"{why}: {error.remedy}" if error.remedy else why
        return Answer(missing=missing, doubts=nodes_problem.doubts, corrections=nodes_problem.corrections)
    return _to_answer(change, nodes_problem, {**nodes_problem.refused, **unfit})


def _replanned(problem: Problem, question: Question, clock: Clock) -> ReplanResult:
    """Replan with the allowed spans, or without them if no plan is feasible with them."""
    allowed = tuple(Pin(name, span) for name, span in sorted(question.allowed_spans.items()))

    def replanned(problem: Problem) -> ReplanResult:
        return replan(
            problem,
            question.current,
            clock=clock,
            rng=random.Random(question.number),
            seconds=question.seconds,
            steps=question.steps,
            standbys=question.standbys,
        )

    if allowed:
        with contextlib.suppress(NoFeasiblePlan):
            return replanned(replace(problem, wishes=replace(problem.wishes, allowed_spans=allowed)))
    return replanned(problem)


def _to_answer(change: ReplanResult, nodes_problem: NodeProblem, refused: Mapping[str, str]) -> Answer:
    problem = change.tables.problem
    reasons = left_out(change.tables, change.evaluation, max(2, _LEFT_OUT_EVALUATIONS // change.tables.count))
    return Answer(
        routes=named_routes(problem, change.evaluation.layout),
        reason=change.reason,
        left_out={**{item.machine: item.reason for item in reasons}, **refused},
        fetched_bytes=change.fetched_bytes,
        before_tokens_per_second=change.before.tokens_per_second,
        tokens_per_second=change.evaluation.tokens_per_second,
        corrections=nodes_problem.corrections,
        doubts=nodes_problem.doubts,
    )
