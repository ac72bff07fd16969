"""A machine that is gone is replaced with few moves, and never by one that may not hold its layers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.coordinator.planner.worlds import GB, LAYERS, machine, swarm

from atoll.coordinator.planner.checks import check_layout
from atoll.coordinator.planner.cost import evaluate
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import Layout, Pin, Problem, Wishes
from atoll.coordinator.planner.question import NamedRoute
from atoll.coordinator.planner.repair import extend_layout, intact_routes, repair_layout
from atoll.coordinator.planner.replan import named_routes

LAST = len(LAYERS) - 1
THIRDS: NamedRoute = (("ann", 0, 3), ("ben", 4, 7), ("cleo", 8, LAST))


def of(wishes: Wishes = Wishes(), **memory_gb: float) -> CostTables:  # noqa: B008
    """Machines by memory: a third of the layers takes 7 GB, two thirds 13 GB."""
    cards = [machine(name, device_memory_bytes=size * GB) for name, size in memory_gb.items()]
    return CostTables(swarm(cards, wishes=wishes))


def mended(tables: CostTables, *current: NamedRoute) -> tuple[NamedRoute, ...]:
    return named_routes(tables.problem, repair_layout(tables, current))


def test_a_spare_takes_the_same_layers() -> None:
    assert mended(of(ann=8, cleo=8, dora=8), THIRDS) == ((("ann", 0, 3), ("dora", 4, 7), ("cleo", 8, LAST)),)


def test_without_a_spare_the_neighbours_share_the_gap() -> None:
    ((ann, cleo),) = mended(of(ann=14, cleo=14), THIRDS)
    assert (ann[0], ann[1], cleo[0], cleo[2]) == ("ann", 0, "cleo", LAST)
    assert 3 < ann[2] < 7  # both have room: each takes some


def test_only_a_neighbour_with_room_takes_the_gap() -> None:
    assert mended(of(ann=6, cleo=16), THIRDS) == ((("ann", 0, 3), ("cleo", 4, LAST)),)


@pytest.mark.parametrize("gone", ["ann", "cleo"])
def test_an_end_that_is_gone_is_taken_by_its_only_neighbour(gone: str) -> None:
    tables = of(**{name: 24 for name in ("ann", "ben", "cleo") if name != gone})
    (route,) = mended(tables, THIRDS)
    assert gone not in [name for name, _, _ in route]
    assert (route[0][1], route[-1][2]) == (0, LAST)


def test_a_card_that_shrank_keeps_what_still_fits() -> None:
    (route,) = mended(of(ann=14, ben=4, cleo=14), THIRDS)
    check_layout(of(ann=14, ben=4, cleo=14).problem, Layout(repair_layout(of(ann=14, ben=4, cleo=14), [THIRDS]).routes))
    assert {name for name, _, _ in route} <= {"ann", "ben", "cleo"}


def test_where_nothing_helps_there_is_no_route() -> None:
    assert mended(of(ann=8, cleo=8), THIRDS) == ()


def test_a_spare_pinned_elsewhere_is_not_used() -> None:
    pinned = Wishes(pins=(Pin("dora", (0, 3)),))
    assert mended(of(pinned, ann=8, cleo=8, dora=8), THIRDS) == ()


def test_newcomers_make_routes_of_their_own() -> None:
    tables = of(ann=8, ben=8, cleo=8, dora=14, emil=14, whale=24)
    kept = intact_routes(tables, [THIRDS])
    assert named_routes(tables.problem, kept) == (THIRDS,)
    assert sorted(len(route) for route in extend_layout(tables, kept).routes) == [1, 2, 3]


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_repaired_layouts_are_feasible_under_random_changes(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"m{number}" for number in range(rng.randint(1, 7))]
    before = of(**{name: rng.choice([4.0, 8.0, 14.0, 24.0]) for name in names})
    current = named_routes(before.problem, extend_layout(before, Layout(())))
    left = {name: rng.choice([4.0, 8.0, 14.0, 24.0]) for name in names if rng.random() < 0.7}
    left |= {f"new{number}": 8.0 for number in range(rng.randint(0, 2))} or {"new": 8.0}
    problem: Problem = of(**left).problem
    tables = CostTables(problem)
    layout = repair_layout(tables, current)
    check_layout(problem, layout)
    assert all(cost.score_rate > 0 for cost in evaluate(tables, layout).routes)
    whole = named_routes(problem, intact_routes(tables, current))
    assert set(whole) <= set(named_routes(problem, layout))


@pytest.mark.parametrize(
    ("pins", "free", "stages"),
    [
        ({"ann": (0, 3), "ben": (0, 7), "cleo": (8, LAST)}, {}, ["ben", "cleo"]),
        ({"ann": (4, 7)}, {"dora": 8, "emil": 8}, None),
        ({"ann": (2, 5), "ben": (6, 7)}, {"dora": 8, "emil": 8, "fay": 8}, None),
        ({"ann": (0, LAST)}, {}, ["ann"]),
    ],
)
def test_pinned_machines_get_routes_through_their_spans(
    pins: dict[str, tuple[int, int]], free: dict[str, float], stages: list[str] | None
) -> None:
    wishes = Wishes(pins=tuple(Pin(name, span) for name, span in pins.items()))
    tables = of(wishes, **dict.fromkeys(pins, 24.0), **free)
    routes = named_routes(tables.problem, extend_layout(tables, Layout(())))
    assert routes
    check_layout(tables.problem, extend_layout(tables, Layout(())))
    assert all((first, last) == pins[name] for route in routes for name, first, last in route if name in pins)
    assert stages is None or [name for name, _, _ in routes[0]] == stages
