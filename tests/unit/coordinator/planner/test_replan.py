"""A new layout must pay for its moves; a machine that is gone is replaced."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from unit.coordinator.planner.worlds import GB, MBIT, TRAINING, machine, swarm

from atoll.coordinator.planner.problem import Pin, Problem, Wishes
from atoll.coordinator.planner.replan import NamedRoute, ReplanResult, named_routes, replan
from atoll.core.clock import SystemClock

ROUTE: NamedRoute = (("ann", 0, 5), ("ben", 6, 11))


def halves(*names: str, wishes: Wishes = Wishes(), **changed: float) -> Problem:  # noqa: B008
    """Machines that each hold half of the layers or a bit more."""
    machines = [machine(name, device_memory_bytes=14 * GB, **changed) for name in names]
    return swarm(machines, training=replace(TRAINING, round_tokens=10**8), wishes=wishes)


def planned(problem: Problem, *routes: NamedRoute) -> ReplanResult:
    return replan(problem, routes, clock=SystemClock(), rng=random.Random(0), seconds=20, steps=100)


def moves(change: ReplanResult) -> bool:
    return change.evaluation.layout != change.before.layout


def test_a_good_plan_stays() -> None:
    change = planned(halves("ann", "ben"), ROUTE)
    assert not moves(change)
    assert "too little" in change.reason
    assert [(stage.machine, stage.first, stage.last) for stage in change.evaluation.layout.routes[0]] == [
        (0, 0, 5),
        (1, 6, 11),
    ]


def test_newcomers_make_a_second_route_and_fetch_only_what_they_lack() -> None:
    pair = halves("ann", "ben")
    change = planned(halves("ann", "ben", "cleo", "dora"), *named_routes(pair, planned(pair).evaluation.layout))
    assert moves(change)
    assert len(change.evaluation.layout.routes) == 2
    assert change.fetched_bytes.keys() == {"cleo", "dora"}


def test_a_spare_takes_the_layers_of_a_machine_that_is_gone() -> None:
    change = planned(halves("ann", "cleo"), ROUTE)
    assert moves(change)
    assert "no route" in change.reason
    assert "cleo" in change.fetched_bytes


def test_moves_that_take_longer_than_they_pay_are_not_made() -> None:
    """Newcomers would double the rate; their downlinks need hours for the state, and the horizon is one."""
    hour = Wishes(horizon_seconds=3600)
    slow = halves("ann", "ben", "cleo", "dora", wishes=hour)
    thin = [
        replace(it, downlink_bytes_per_second=2 * MBIT) if it.name in ("cleo", "dora") else it for it in slow.machines
    ]
    assert moves(planned(slow, ROUTE))
    assert not moves(planned(replace(slow, machines=tuple(thin)), ROUTE))


@pytest.mark.parametrize(("speed", "taken"), [(1.03, False), (3.0, True)])
def test_noise_is_not_worth_a_move_and_a_real_change_is(speed: float, taken: bool) -> None:
    problem = halves("ann", "ben")
    faster = replace(problem.machines[0], flops_per_second=speed * 1e13)
    assert moves(planned(replace(problem, machines=(faster, problem.machines[1])), ROUTE)) is taken


@pytest.mark.parametrize(
    ("speed", "speed_measured", "taken"), [(1.12, False, False), (1.12, True, True), (1.5, False, True)]
)
def test_no_machine_loses_its_place_to_one_that_only_claims_to_be_a_little_faster(
    speed: float, speed_measured: bool, taken: bool
) -> None:
    """Only one of the two that may hold the second half can have a place, and it sets the pace."""
    pins = (Pin("ann", (0, 5)), Pin("ben", (6, 11)), Pin("cleo", (6, 11)))
    problem = halves("ann", "ben", "cleo", wishes=Wishes(pins=pins))
    fast = [replace(it, flops_per_second=pace * 1e12) for it, pace in zip(problem.machines, (9, 1, speed), strict=True)]
    other = replace(fast[2], speed_measured=speed_measured)
    change = planned(replace(problem, machines=(*fast[:2], other)), ROUTE)
    assert moves(change) is taken
    assert (other.name in {name for name, _, _ in named_routes(problem, change.evaluation.layout)[0]}) is taken
