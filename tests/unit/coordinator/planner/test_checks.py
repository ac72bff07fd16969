"""Bad input is refused by name and figure; where no plan exists, the error says what is missing."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from unit.coordinator.planner.worlds import GB, LAYERS, TRAINING, machine, swarm

from atoll.coordinator.planner.checks import check_layout, check_problem
from atoll.coordinator.planner.links import MeasuredPath
from atoll.coordinator.planner.problem import Goal, Layout, Pin, Problem, Reach, Stage, Wishes
from atoll.coordinator.planner.solve import Solution, solve
from atoll.core.clock import SystemClock
from atoll.core.errors import NoFeasiblePlan, PlanInputInvalid


def solved(problem: Problem, **how: Any) -> Solution:
    return solve(problem, clock=SystemClock(), rng=random.Random(0), seconds=20, steps=40, **how)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_memory_bytes", math.nan),
        ("host_memory_bytes", -1.0),
        ("uplink_bytes_per_second", 0.0),
        ("downlink_bytes_per_second", math.inf),
        ("flops_per_second", -1.0),
        ("flops_per_second", math.nan),
        ("price_per_hour", -0.1),
        ("availability", 0.0),
        ("availability", 1.5),
        ("failures_per_hour", math.inf),
        ("seconds_per_token", {"block": (math.nan, 1.0)}),
    ],
)
def test_an_invalid_figure_is_named_with_its_machine(field: str, value: object) -> None:
    with pytest.raises(PlanInputInvalid, match=f"{field} of ann"):
        check_problem(swarm([machine("ann", **{field: value}), machine("ben")]))


def test_a_machine_of_unknown_speed_is_named() -> None:
    with pytest.raises(PlanInputInvalid, match="ann has neither a time for layers of kind"):
        check_problem(swarm([machine("ann", flops_per_second=0.0, seconds_per_token={"block": (1e-4, 2e-4)})]))


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ((Pin("eve", (0, 1)),), "'eve', and there is no such machine"),
        ((Pin("ann", (3, 99)),), "layers 3–99; the model has layers 0–11"),
        ((Pin("ann", (4, 2)),), "layers 4–2"),
        ((Pin("ann", (0, 1)), Pin("ann", (2, 3))), "pin 'ann' is given twice"),
        ((Pin("ben", (0, 1)),), "ben is pinned to an end of the model, and trusted_ends"),
    ],
)
def test_pins_that_contradict_are_refused(pins: tuple[Pin, ...], words: str) -> None:
    machines = [machine("ann"), machine("ben", trusted=False)]
    with pytest.raises(PlanInputInvalid, match=words):
        check_problem(swarm(machines, wishes=Wishes(pins=pins, trusted_ends=True)))


def test_a_pin_that_memory_cannot_hold_says_what_it_takes() -> None:
    with pytest.raises(PlanInputInvalid, match=r"pinned to layers 0–11, which take 1\d\.\d GiB"):
        solved(swarm([machine("ann", device_memory_bytes=4 * GB)], wishes=Wishes(pins=(Pin("ann", (0, 11)),))))


def test_an_invalid_link_figure_is_named() -> None:
    problem = swarm([machine("ann"), machine("ben")])
    rtt = problem.links.rtt_seconds.copy()
    rtt[0, 1] = np.nan
    with pytest.raises(PlanInputInvalid, match="round trip ann – ben"):
        check_problem(replace(problem, links=replace(problem.links, rtt_seconds=rtt)))
    with pytest.raises(PlanInputInvalid, match="bandwidth ann – ben"):
        swarm([machine("ann"), machine("ben")], [MeasuredPath("ann", "ben", 0.1, -1.0)])
    with pytest.raises(PlanInputInvalid, match="'eve'"):
        swarm([machine("ann"), machine("ben")], [MeasuredPath("ann", "eve", 0.1)])


def test_prices_are_asked_for_where_they_decide() -> None:
    with pytest.raises(PlanInputInvalid, match="ann has no price_per_hour"):
        check_problem(swarm([machine("ann", price_per_hour=0.0)], wishes=Wishes(Goal.PRICE)))


def test_too_little_memory_says_how_much_and_what_fits() -> None:
    with pytest.raises(NoFeasiblePlan, match=r"needs \d+\.\d GiB more memory.* hold \d of 12 layers.* on ann"):
        solved(swarm([machine("ann", device_memory_bytes=6 * GB), machine("ben", device_memory_bytes=3 * GB)]))


def test_one_layer_that_fits_nowhere_is_named() -> None:
    layers = (*LAYERS[:5], replace(LAYERS[5], parameters=10**10), *LAYERS[6:])
    with pytest.raises(NoFeasiblePlan, match=r"more memory on one machine: layer block\.4 takes"):
        solved(swarm([machine("ann"), machine("ben")], layers=layers))


def test_a_layer_that_rules_forbid_everywhere_is_named() -> None:
    machines = [machine("ann", trusted=False), machine("ben", trusted=False)]
    with pytest.raises(NoFeasiblePlan, match="no machine may hold layer embedding"):
        solved(swarm(machines, wishes=Wishes(trusted_ends=True)))


def test_closed_links_are_no_links() -> None:
    """Each could hold half; one direction between them is closed."""
    machines = [machine(name, device_memory_bytes=14 * GB) for name in ("ann", "ben")]
    assert len(solved(swarm(machines)).evaluation.layout.machines) == 2
    with pytest.raises(NoFeasiblePlan):
        solved(swarm(machines, [MeasuredPath("ann", "ben", 0.02, 1e9, 0.0)]))
    with pytest.raises(NoFeasiblePlan):
        solved(swarm([replace(it, reach=Reach.OUTBOUND) for it in machines]))


def test_of_two_islands_the_faster_trains() -> None:
    machines = [machine(name) for name in ("ann", "ben", "cleo", "dora", "eve")]
    shut = [MeasuredPath(one, other, 0.1, 0.0) for one in ("ann", "ben") for other in ("cleo", "dora", "eve")]
    found = solved(swarm(machines, shut, training=replace(TRAINING, round_tokens=10**8)))
    assert sorted(found.evaluation.layout.machines) == [2, 3, 4]


def test_a_layout_that_skips_a_layer_is_refused() -> None:
    problem = swarm([machine("ann"), machine("ben")])
    for route in ((), (Stage(0, 0, 5),), (Stage(0, 0, 5), Stage(1, 7, 11)), (Stage(0, 0, 5), Stage(0, 6, 11))):
        with pytest.raises(PlanInputInvalid):
            check_layout(problem, Layout((route,)))
    check_layout(problem, Layout(((Stage(1, 0, 5), Stage(0, 6, 11)),)))
