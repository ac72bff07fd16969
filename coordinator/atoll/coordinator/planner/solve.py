"""Solves a placement problem: exactly for few machines, otherwise by construction and local search. Pure and anytime.

`solve` returns the best layout found when its time is over; `clock` and `rng` are passed in. Machines that do not reach
each other cannot train together, so each island of machines is solved by itself, and the fastest one is used.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.planner.budget import Budget
from atoll.coordinator.planner.checks import check_pins_fit, check_problem, why_infeasible
from atoll.coordinator.planner.cost import Evaluation, evaluate, route_cost
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.exact_solver import MOST_MACHINES, solve_exactly
from atoll.coordinator.planner.links import islands
from atoll.coordinator.planner.local_search import Search
from atoll.coordinator.planner.problem import Goal, Layout, Problem
from atoll.coordinator.planner.route_builder import RouteBuilder
from atoll.coordinator.planner.splits import Split
from atoll.core.clock import Clock

_EXACT_TIME_SHARE = 0.6  # of the time, before the local search starts
_CONSTRUCTION_TIME_SHARE = 0.4  # of the time for the local search
_PHASES = 3  # local searches; each starts from the best layout so far
_SMALL_POOL_PHASES = 10  # the same for few machines; every second search starts from random routes
_SMALL_POOL_MACHINES = 16
_ROUND_LIMIT_FACTORS = (0.7, 0.45, 0.3, 0.2, 0.1, 0.05)  # × the round of the first routes
_ROUND_LIMIT_RANGE = (0.3, 1.0)  # × the round of the best layout, where it is the bottleneck or there is none
_ROUND_LIMIT_PROBABILITY = 0.7  # of a search with such a limit, in that case


@dataclass(frozen=True)
class Solution:
    """A layout, and the proven bound on a better one."""

    tables: CostTables
    evaluation: Evaluation
    gap: float  # largest share by which the optimum may be better; 0: it is optimal; inf: nothing is proven
    steps: int
    seconds: float

    @property
    def problem(self) -> Problem:
        return self.tables.problem


def solve(
    problem: Problem,
    *,
    clock: Clock,
    rng: random.Random,
    seconds: float,
    steps: int | None = None,
    start: Layout | None = None,
    exact: bool = True,
) -> Solution:
    """Return the best layout found in that time, or in that many search steps.

    `start`: a layout to improve, as far as it is still feasible. `exact=False`: skip the exact solver. Raises
    `PlanInputInvalid`, and `NoFeasiblePlan` with what is missing.
    """
    began, budget = clock.monotonic(), Budget.of_seconds(clock, seconds, steps)
    check_problem(problem)
    tables = CostTables(problem)
    check_pins_fit(tables)
    best: Evaluation | None = None
    gap, taken = 0.0, 0
    for island in islands(tables.hops.usable):
        if best is not None and _no_better(tables, island, best):
            continue
        found, its_gap, its_steps = _solve_island(tables, island, budget, rng, start, exact)
        taken += its_steps
        if found is not None and (best is None or found.score > best.score):
            best, gap = found, its_gap
    if best is None:
        raise why_infeasible(tables)
    return Solution(tables, best, gap, taken, clock.monotonic() - began)


def _solve_island(
    tables: CostTables, island: Sequence[int], budget: Budget, rng: random.Random, start: Layout | None, exact: bool
) -> tuple[Evaluation | None, float, int]:
    """Best layout of one island, its gap, and the steps taken."""
    if sum(tables.stage(machine).most_layers for machine in island) < tables.layers:
        return None, 0.0, 0
    known = math.inf
    first: Evaluation | None = None
    if exact and len(island) <= MOST_MACHINES:
        found = solve_exactly(tables, island, budget.part(_EXACT_TIME_SHARE))
        if not found.gap:
            return found.best, 0.0, 0
        first, known = found.best, found.bound
    given = start or (first.layout if first else None)
    best, taken = _search(tables, island, budget.part(0.95), rng, given)
    if first is not None and first.score >= best.score:
        best = first
    return (best, max(0.0, known / best.score - 1), taken) if best.score else (None, 0.0, taken)


def _search(
    tables: CostTables, island: Sequence[int], budget: Budget, rng: random.Random, given: Layout | None
) -> tuple[Evaluation, int]:
    """Best layout by construction and local search, and the steps taken.

    Where the outer round is the bottleneck, most searches limit spans to those that allow a shorter round.
    """
    free = builder = RouteBuilder(tables)
    routes = _routes_of(builder, given, island)
    if not routes:
        routes, builder = _constructed(tables, island, budget)
    best, taken = evaluate(tables, _layout(routes)), 0
    phases = _SMALL_POOL_PHASES if len(island) <= _SMALL_POOL_MACHINES else 1 if given else _PHASES
    for phase in range(phases):
        part = budget.part(1 / (phases - phase))
        found = Search(tables, builder, island, routes, rng).run(part)
        taken += part.taken
        best = found if found.score > best.score else best
        if budget.spent() >= 1:
            break
        builder = free
        binds = len(best.layout.routes) < 2 or best.round.seconds > best.round.interval_seconds
        if binds and rng.random() < _ROUND_LIMIT_PROBABILITY:
            builder = RouteBuilder(tables.with_round_limit(rng.uniform(*_ROUND_LIMIT_RANGE) * best.round.seconds))
        afresh = len(island) <= _SMALL_POOL_MACHINES and phase % 2 == 0
        routes = builder.random_routes(island, rng) if afresh else _routes_of(builder, best.layout, island)
    return best, taken


def _constructed(tables: CostTables, island: Sequence[int], budget: Budget) -> tuple[list[Split], RouteBuilder]:
    """Build first routes; where the outer round is their bottleneck, those for the round limit with the best score."""
    builder = RouteBuilder(tables)
    routes = builder.first_routes(island)
    first = best = evaluate(tables, _layout(routes))
    for share in _ROUND_LIMIT_FACTORS:
        if best.round.seconds <= best.round.interval_seconds or budget.spent() > _CONSTRUCTION_TIME_SHARE:
            break
        shorter = RouteBuilder(tables.with_round_limit(share * first.round.seconds))
        tried = shorter.first_routes(island)
        value = evaluate(tables, _layout(tried))
        if value.score > best.score:
            routes, builder, best = tried, shorter, value
    return routes, builder


def _layout(routes: Sequence[Split]) -> Layout:
    return Layout(tuple(split.route for split in routes))


def _routes_of(builder: RouteBuilder, layout: Layout | None, island: Sequence[int]) -> list[Split]:
    """Routes of a layout that are still feasible; with a new split where the old one is infeasible."""
    members, found = set(island), []
    for route in layout.routes if layout else ():
        order = tuple(stage.machine for stage in route)
        if members.issuperset(order):
            cost = route_cost(builder.tables, route)
            kept = Split(cost.score_rate, route, cost.price_per_second)
            found.append(kept if kept.score_rate else builder.split(order))
    return [split for split in found if split.score_rate]


def _no_better(tables: CostTables, island: Sequence[int], best: Evaluation) -> bool:
    """True if an island would train less than `best` even if only compute took time."""
    if tables.problem.wishes.goal is Goal.PRICE:
        return False
    total = 0.0
    for machine in island:
        forward, backward = tables.seconds_per_token(machine)
        total += 1 / max(float((forward + backward).sum()), 1e-12)
    return total <= best.score
