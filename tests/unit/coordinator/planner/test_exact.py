"""The exact solver finds what trying everything finds, by another evaluation of the same objective."""

from __future__ import annotations

import random

import pytest
from benchmarks.planner_brute import brute_force
from benchmarks.planner_instances import small

from atoll.coordinator.planner.budget import Budget
from atoll.coordinator.planner.checks import check_layout, check_pins_fit, check_problem
from atoll.coordinator.planner.cost import evaluate
from atoll.coordinator.planner.exact import solve_exactly
from atoll.coordinator.planner.tables import Tables
from atoll.core.clock import ManualClock, SystemClock
from atoll.core.errors import PlanInputInvalid

BINDING = (196, 204)  # a round holds their best layouts up


@pytest.mark.parametrize("seed", [*range(40), *BINDING])
def test_the_optimum_is_that_of_brute_force(seed: int) -> None:
    problem = small(random.Random(seed), most=5, layers=(4, 8))
    tables = Tables(problem)
    try:
        check_problem(problem)
        check_pins_fit(tables)
    except PlanInputInvalid:
        return
    score, layout = brute_force(problem)
    found = solve_exactly(tables, range(len(problem.machines)), Budget.of_seconds(SystemClock(), 60))
    assert found.gap == 0
    assert (found.best.score if found.best else 0.0) == pytest.approx(score, rel=1e-9)
    if layout is not None and found.best is not None:
        check_layout(problem, found.best.layout)
        assert evaluate(tables, layout).score == pytest.approx(score, rel=1e-9)


def test_without_time_it_says_that_nothing_is_proven() -> None:
    problem = small(random.Random(1), most=5)
    budget = Budget.of_seconds(ManualClock(), 60, steps=1)
    budget.taken = 1
    found = solve_exactly(Tables(problem), range(len(problem.machines)), budget)
    assert found.gap > 0
