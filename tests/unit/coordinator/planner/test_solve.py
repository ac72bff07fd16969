"""The search: what it returns can be, is no worse than what it began with, and repeats where its steps are counted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from benchmarks.planner_instances import consumers, small
from unit.coordinator.planner.worlds import GB, MBIT, TRAINING, machine, swarm

from atoll.coordinator.planner.checks import check_layout, check_problem
from atoll.coordinator.planner.cost import evaluate
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import Goal, Layout, Pin, Problem, Wishes
from atoll.coordinator.planner.solve import Solution, solve
from atoll.coordinator.planner.splits import best_split
from atoll.core.clock import ManualClock
from atoll.core.errors import NoFeasiblePlan, PlanInputInvalid


def searched(problem: Problem, steps: int = 150, start: Layout | None = None, *, exact: bool = False) -> Solution:
    return solve(problem, clock=ManualClock(), rng=random.Random(0), seconds=1e6, steps=steps, start=start, exact=exact)


@pytest.mark.parametrize("seed", range(25))
def test_solutions_are_feasible(seed: int) -> None:
    problem = small(random.Random(seed))
    try:
        found = searched(problem)
    except (NoFeasiblePlan, PlanInputInvalid):
        return
    check_layout(problem, found.evaluation.layout)
    for route in found.evaluation.layout.routes:
        for stage in route:
            assert found.tables.fits(stage.machine)[stage.first, stage.last + 1]
            machine = problem.machines[stage.machine]
            pinned = {pin.machine: pin.span for pin in problem.wishes.pins}
            assert pinned.get(machine.name, (stage.first, stage.last)) == (stage.first, stage.last)
            at_end = stage.first == 0 or stage.last == len(problem.layers) - 1
            assert machine.trusted or not (problem.wishes.trusted_ends and at_end)


def test_counted_steps_repeat() -> None:
    problem = consumers(random.Random(0), 30)
    assert searched(problem, 60).evaluation == searched(problem, 60).evaluation


def test_from_a_layout_it_never_gets_worse() -> None:
    problem = consumers(random.Random(1), 30)
    first = searched(problem, 20)
    assert searched(problem, 40, first.evaluation.layout).evaluation.score >= first.evaluation.score * (1 - 1e-9)


def test_a_swarm_whose_machines_hold_everything_is_planned_as_replicas() -> None:
    machines = [machine(f"m{number}") for number in range(12)]
    training = replace(TRAINING, round_tokens=10**9)
    layout = searched(swarm(machines, training=training)).evaluation.layout
    assert sorted(layout.machines) == list(range(12))
    assert all(len(route) == 1 for route in layout.routes)


def test_a_machine_that_would_delay_every_round_is_left_out() -> None:
    machines = [machine("ann"), machine("ben"), machine("slow", uplink_bytes_per_second=2 * MBIT)]
    training = replace(TRAINING, round_tokens=300_000)
    assert sorted(searched(swarm(machines, training=training), exact=True).evaluation.layout.machines) == [0, 1]


def test_layers_go_by_speed_where_memory_allows() -> None:
    """Both could hold 8 of 12 layers; one is three times as fast."""
    machines = [
        machine("fast", device_memory_bytes=14 * GB, flops_per_second=3e13),
        machine("slow", device_memory_bytes=14 * GB),
    ]
    route = searched(swarm(machines), exact=True).evaluation.layout.routes[0]
    held = {stage.machine: stage.last - stage.first + 1 for stage in route}
    assert held[0] > held[1]


def test_a_cheap_plan_leaves_out_a_machine_that_costs_more_than_it_adds() -> None:
    machines = [machine("cheap"), machine("dear", price_per_hour=5.0)]
    training = replace(TRAINING, round_tokens=10**9)
    assert searched(swarm(machines, training=training), exact=True).evaluation.layout.machines == (0, 1)
    dear = swarm(machines, training=training, wishes=Wishes(Goal.PRICE))
    assert searched(dear, exact=True).evaluation.layout.machines == (0,)


def test_a_pinned_machine_holds_what_it_is_pinned_to_and_one_that_is_pinned_out_nothing() -> None:
    machines = [machine(name, device_memory_bytes=16 * GB) for name in ("ann", "ben", "cleo")]
    pins = (Pin("ben", (0, 4)), Pin("cleo", None))
    route = searched(swarm(machines, wishes=Wishes(pins=pins)), exact=True).evaluation.layout.routes[0]
    assert [(stage.machine, stage.first, stage.last) for stage in route] == [(1, 0, 4), (0, 5, 11)]


@pytest.mark.parametrize("seed", range(10))
def test_no_other_cuts_of_an_order_are_much_better(seed: int) -> None:
    """Bounds on the period are a grid: what it gives away is at most a step of it."""
    problem = consumers(random.Random(seed), 8)
    check_problem(problem)
    tables, order, rng = CostTables(problem), list(range(8)), random.Random(seed)
    rng.shuffle(order)
    coarse, fine = best_split(tables, order), best_split(tables, order, [1 + 0.01 * step for step in range(200)])
    assert fine.score_rate >= coarse.score_rate >= 0.93 * fine.score_rate
    if coarse.score_rate:
        value = evaluate(tables, Layout((coarse.route,)))
        assert value.routes[0].score_rate >= coarse.score_rate * (1 - 1e-9)
