"""The exact solver finds what trying everything finds, by another evaluation of the same objective."""

from __future__ import annotations

import random

import pytest
from benchmarks.planner_brute import brute_force
from benchmarks.planner_instances import small

from atoll.coordinator.planner.budget import Budget
from atoll.coordinator.planner.checks import check_layout
from atoll.coordinator.planner.cost import evaluate
from atoll.coordinator.planner.exact import solve_exactly
from atoll.coordinator.planner.solve import solve
from atoll.coordinator.planner.tables import Tables
from atoll.core.clock import ManualClock, SystemClock
from atoll.core.errors import NoFeasiblePlan, PlanInputInvalid

BINDING = (196, 204)  # a round holds their best layouts up


@pytest.mark.parametrize("seed", [*range(40), *BINDING])
def test_the_optimum_is_that_of_brute_force(seed: int) -> None:
    problem = small(random.Random(seed), most=5, layers=(4, 8))
    score, layout = brute_force(problem)
    try:
        found = solve(problem, clock=SystemClock(), rng=random.Random(0), seconds=120)
    except PlanInputInvalid:  # a random pin that cannot be
        return
    except NoFeasiblePlan:
        assert layout is None
        return
    assert found.gap == 0
    assert found.evaluation.score == pytest.approx(score, rel=1e-9)
    check_layout(problem, found.evaluation.layout)
    assert layout is not None
    assert evaluate(found.tables, layout).score == pytest.approx(score, rel=1e-9)


def test_without_time_it_says_that_nothing_is_proven() -> None:
    problem = small(random.Random(1), most=5)
    budget = Budget.of_seconds(ManualClock(), 60, steps=1)
    budget.taken = 1
    found = solve_exactly(Tables(problem), range(len(problem.machines)), budget)
    assert found.gap > 0
