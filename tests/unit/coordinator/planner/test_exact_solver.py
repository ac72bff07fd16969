"""The exact solver finds what trying everything finds, by another evaluation of the same objective."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from benchmarks.planner_brute import brute_force
from benchmarks.planner_instances import small
from unit.coordinator.planner.worlds import GB, TRAINING, machine, swarm

from atoll.coordinator.planner import exact_solver
from atoll.coordinator.planner.budget import Budget
from atoll.coordinator.planner.checks import check_layout
from atoll.coordinator.planner.cost import evaluate
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.exact_solver import solve_exactly
from atoll.coordinator.planner.links import MeasuredPath
from atoll.coordinator.planner.solve import solve
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


def test_without_time_no_bound_is_proven() -> None:
    problem = small(random.Random(1), most=5)
    budget = Budget.of_seconds(ManualClock(), 60, steps=1)
    budget.taken = 1
    found = solve_exactly(CostTables(problem), range(len(problem.machines)), budget)
    assert found.gap > 0


def test_a_bound_that_was_left_unproven_is_told_when_the_budget_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows between inner stages make many divisions unproven: none of them may be forgotten."""

    class Steps:
        def __init__(self, most: int) -> None:
            self.left = most

        def over(self) -> bool:
            self.left -= 1
            return self.left < 0

    looked = 0
    for seed in (0, 1, 2, 3, 4, 5):
        rng = random.Random(seed)
        machines = [
            machine(
                f"m{number}", flops_per_second=rng.uniform(2e12, 2e13), device_memory_bytes=rng.choice([7, 9, 12]) * GB
            )
            for number in range(4)
        ]
        pairs = combinations([it.name for it in machines], 2)
        paths = [MeasuredPath(one, other, rng.choice([0.005, 0.4])) for one, other in pairs]
        training = replace(TRAINING, micro_batches=64, ahead=rng.choice([0, 1]))
        tables = CostTables(swarm(machines, paths, training=training))
        monkeypatch.setattr(exact_solver, "_MOST_ROUTES", 10**9)
        full = exact_solver.solve_exactly(tables, range(4), Steps(10**9))  # type: ignore[arg-type]
        if full.best is None or full.gap:
            continue
        monkeypatch.setattr(exact_solver, "_MOST_ROUTES", 300)
        for steps in range(1, 60):
            found = exact_solver.solve_exactly(tables, range(4), Steps(steps))  # type: ignore[arg-type]
            if found.best is not None:
                looked += 1
                assert full.best.score <= found.bound * (1 + 1e-9)
    assert looked
