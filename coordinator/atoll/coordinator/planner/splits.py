"""Finds the best contiguous, unequal split of the layers over an ordered list of machines. Pure.

A flush costs a sum (through) and a maximum (period). For each bound on the period, dynamic programming over cuts finds
the least sum; the best bound wins. The least feasible bound is found first, in the same way. The other bounds are a
grid above it, so the result is worse than the optimum by one step of the grid at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.coordinator.planner.cost import flush_seconds, period_lower_bound, route_cost
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import FloatArray, Route, Stage

PERIOD_BOUND_FACTORS = (1.0, 1.02, 1.06, 1.15, 1.35, 2.0)  # × the least period


@dataclass(frozen=True)
class Split:
    """A route with its cost. `score_rate` is `RouteCost.score_rate`; 0: no split is feasible."""

    score_rate: float
    route: Route
    price_per_second: float


NO_SPLIT = Split(0.0, (), 0.0)


def best_split(tables: CostTables, order: Sequence[int], bounds: Sequence[float] = PERIOD_BOUND_FACTORS) -> Split:
    """Best split over the machines in that order, each with at least one layer."""
    if not all(tables.stage(machine).most_layers for machine in order):
        return NO_SPLIT
    least = _least_period(tables, order)
    if not np.isfinite(least):
        return NO_SPLIT
    limits = least * (1 + 1e-12) * np.array(bounds)
    sums = _sums(tables, order, limits)
    through = sums[-1][:, :, -1].min(axis=1).tolist()
    flush = [
        flush_seconds(tables, it, period_lower_bound(tables, it, limit, len(order)), order)
        for it, limit in zip(through, limits.tolist(), strict=True)
    ]
    best = min(range(len(flush)), key=lambda place: flush[place])
    route = _route_of(order, [table[best] for table in sums], tables.layers)
    cost = route_cost(tables, route)
    return Split(cost.score_rate, route, cost.price_per_second)


def _route_of(order: Sequence[int], sums: Sequence[FloatArray], layers: int) -> Route:
    """The stages of the least sum of all layers, by stage: of its length and end, [K, L + 1]."""
    route, end = [], layers
    for machine, table in zip(reversed(order), reversed(sums), strict=True):
        start = end - 1 - int(table[:, end].argmin())
        route.append(Stage(machine, start, end - 1))
        end = start
    return tuple(reversed(route))


def _least_period(tables: CostTables, order: Sequence[int]) -> float:
    """Least period of the slowest stage or hop over all splits; infinite if no split is feasible."""
    reached = np.full(tables.layers + 1, np.inf)  # by layers covered
    reached[0] = 0.0
    before = None
    for machine in order:
        if before is not None and tables.hops.limits_rate[before, machine]:
            reached = np.maximum(reached, tables.hops.costs(before, machine)[1])
        start, _, period = tables.stage(machine).by_length
        reached = np.maximum(reached[start], period).min(axis=0)
        before = machine
    return float(reached[-1])


def _sums(tables: CostTables, order: Sequence[int], limits: FloatArray) -> list[FloatArray]:
    """Least sums by stage, for each of T limits on the period, by the stage's length and end, [T, K, L + 1]."""
    reached = np.full((len(limits), tables.layers + 1), np.inf)
    reached[:, 0] = 0.0
    found: list[FloatArray] = []
    before = None
    for machine in order:
        if before is not None:
            total, period = tables.hops.costs(before, machine)
            reached = reached + total
            if tables.hops.limits_rate[before, machine]:
                reached[period > limits[:, None]] = np.inf
        start, total, period = tables.stage(machine).by_length
        sums = reached[:, start] + total
        sums[period > limits[:, None, None]] = np.inf
        reached = sums.min(axis=1)
        found.append(sums)
        before = machine
    return found
