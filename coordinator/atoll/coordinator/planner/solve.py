"""From a problem to a layout: exactly where machines are few, else by construction and local search. Pure and anytime.

`clock` and `rng` are passed in, and the best layout so far is there whenever the time is up. Machines that do not reach
each other cannot train together: the swarm is the island that trains fastest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.planner.budget import Budget
from atoll.coordinator.planner.build import Builder
from atoll.coordinator.planner.checks import check_pins_fit, check_problem, why_infeasible
from atoll.coordinator.planner.cost import Evaluation
from atoll.coordinator.planner.exact import MOST_MACHINES, solve_exactly
from atoll.coordinator.planner.links import islands
from atoll.coordinator.planner.problem import Layout, Problem
from atoll.coordinator.planner.search import Search
from atoll.coordinator.planner.splits import Split
from atoll.coordinator.planner.tables import Tables
from atoll.core.clock import Clock

_FOR_EXACT = 0.6  # of the time, before the other way is gone


@dataclass(frozen=True)
class Solution:
    """A layout and how good it is known to be."""

    tables: Tables
    evaluation: Evaluation
    gap: float  # the optimum is better by this share at most; 0: it is this one; inf: nothing is proven
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
    """The best layout found in that time, or in so many steps of the search.

    `start`: a layout to improve, as far as it is still possible. `exact=False`: never the exact solver. Raises
    `PlanInputInvalid`, and `NoFeasiblePlan` with what is missing.
    """
    check_problem(problem)
    tables = Tables(problem)
    check_pins_fit(tables)
    began, budget = clock.monotonic(), Budget.of_seconds(clock, seconds, steps)
    best: Evaluation | None = None
    gap, taken = 0.0, 0
    for island in islands(tables.usable):
        if best is not None and _most_tokens_per_second(tables, island) <= best.tokens_per_second:
            continue
        found, its_gap, its_steps = _solve_island(tables, island, budget, rng, start, exact)
        taken += its_steps
        if found is not None and (best is None or found.score > best.score):
            best, gap = found, its_gap
    if best is None:
        raise why_infeasible(tables)
    return Solution(tables, best, gap, taken, clock.monotonic() - began)


def _solve_island(
    tables: Tables, island: Sequence[int], budget: Budget, rng: random.Random, start: Layout | None, exact: bool
) -> tuple[Evaluation | None, float, int]:
    """The best of one island, its gap, and the steps taken."""
    if sum(tables.stage(machine).most_layers for machine in island) < tables.layers:
        return None, 0.0, 0
    known = math.inf
    first: Evaluation | None = None
    if exact and len(island) <= MOST_MACHINES:
        found = solve_exactly(tables, island, budget.part(_FOR_EXACT))
        if not found.gap:
            return found.best, 0.0, 0
        first, known = found.best, found.bound
    builder = Builder(tables)
    routes = _routes_of(builder, start or (first.layout if first else None), island)
    routes = routes or builder.first_routes(island)
    part = budget.part(0.95)
    best = Search(builder, island, routes, rng).run(part)
    if not best.score:
        return first, known, part.taken
    if first is not None and first.score > best.score:
        best = first
    return best, max(0.0, known / best.score - 1), part.taken


def _routes_of(builder: Builder, layout: Layout | None, island: Sequence[int]) -> list[Split]:
    """The routes of a layout that can still be, cut anew."""
    members = set(island)
    orders = [tuple(stage.machine for stage in route) for route in layout.routes] if layout else []
    splits = [builder.split(order) for order in orders if members.issuperset(order)]
    return [split for split in splits if split.rate]


def _most_tokens_per_second(tables: Tables, island: Sequence[int]) -> float:
    """What the machines of an island could train if nothing but computing took time."""
    total = 0.0
    for machine in island:
        forward, backward = tables.seconds_per_token(machine)
        total += 1 / max(float((forward + backward).sum()), 1e-12)
    return total
