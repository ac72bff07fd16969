"""Finds the optimal layout of a few machines, or the best one within a budget and a bound on the optimum. Pure.

Routes interact only in the outer round. So the best route of every subset of machines is found first: by dynamic
programming over (machines used, last machine, layers covered), after Held and Karp (*A dynamic programming approach to
sequencing problems*, 1962), once for every possible value of the period of its stages and hops. Then all partitions of
the machines into routes are tried, in the order of an upper bound of their score, until no other can be better than the
best seen. The bound ignores outer rounds, and all in-flight limits except the one from first to last stage. Where the
outer round or another in-flight limit is the bottleneck, other routes of the same machines may be better: all of them
are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from atoll.coordinator.planner.budget import Budget
from atoll.coordinator.planner.cost import (
    Evaluation,
    evaluate,
    flush_seconds,
    period_lower_bound,
    round_latency,
    route_cost,
    route_rate,
    score,
)
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import FloatArray, Layout, Route, Stage

MOST_MACHINES = 8
_MOST_ROUTES = 20_000  # of the same machines that are tried; with more, the result has a gap
_CHUNK = 64  # most period values at a time: bounds memory
_CHUNK_CELLS = 200_000  # most period values × spans at a time
_RELATIVE_TOLERANCE = 1e-9  # rounding error between equal scores


@dataclass(frozen=True)
class ExactResult:
    """`best` is None if no layout exists. `bound`: no layout has a higher score."""

    best: Evaluation | None
    bound: float

    @property
    def gap(self) -> float:
        """Largest share by which the optimum may be better than `best`; 0: `best` is optimal."""
        if self.best is None or not self.best.score:
            return 0.0 if self.bound == 0 else math.inf
        return max(0.0, self.bound / self.best.score - 1)


def solve_exactly(tables: CostTables, machines: Sequence[int], budget: Budget) -> ExactResult:
    """Return the optimum over `machines` (at most `MOST_MACHINES`), or the best layout found within the budget."""
    assert len(machines) <= MOST_MACHINES
    routes = best_routes(tables, machines, budget)
    if routes is None:
        return ExactResult(None, math.inf)
    best: Evaluation | None = None
    unproven = 0.0
    for bound, subsets in _partitions(tables, routes):
        if best is not None and bound <= best.score * (1 + _RELATIVE_TOLERANCE):
            break
        best, proven = _improve(tables, [routes[subset].route for subset in subsets], bound, best, budget)
        unproven = unproven if proven else max(unproven, bound)
        if budget.over():
            return ExactResult(best, max(bound, unproven))
    return ExactResult(best, max(unproven, best.score if best else 0.0))


@dataclass(frozen=True)
class FastestRoute:
    """A route of some machines, and an upper bound on `RouteCost.score_rate` of any route of them."""

    route: Route
    bound: float


def best_routes(
    tables: CostTables, machines: Sequence[int], budget: Budget
) -> dict[frozenset[int], FastestRoute] | None:
    """Fastest route of each subset of `machines`, using all of the subset; None: the budget ended.

    Where an in-flight limit other than from first to last stage is the bottleneck, the route need not be the fastest:
    its rate is then below its bound.
    """
    least: dict[frozenset[int], tuple[float, float]] = {}  # seconds of a flush, limit of the period
    limits = _periods(tables, machines)
    size = max(1, min(_CHUNK, _CHUNK_CELLS // (tables.layers + 1) ** 2))
    for start in range(0, len(limits), size):
        chunk = limits[start : start + size]
        for subset, through in _through_by_subset(tables, machines, chunk):
            flush = [
                flush_seconds(tables, it, period_lower_bound(tables, it, limit, len(subset)), subset)
                for it, limit in zip(through.tolist(), chunk.tolist(), strict=True)
            ]
            quickest = int(np.argmin(flush))
            if flush[quickest] < least.get(subset, (math.inf, 0.0))[0]:
                least[subset] = flush[quickest], float(chunk[quickest])
        if budget.over():
            return None
    return {
        subset: FastestRoute(_route(tables, sorted(subset), limit), route_rate(tables, flush, sorted(subset)))
        for subset, (flush, limit) in least.items()
    }


def _periods(tables: CostTables, machines: Sequence[int]) -> FloatArray:
    """All values that the period of a route of these machines can have, ascending."""
    stages = [tables.stage(machine).period.ravel() for machine in machines]
    hops = [tables.hops.costs(one, other)[1][1:-1] for one, other in permutations(machines, 2)]
    values = np.unique(np.concatenate(stages + hops))
    return values[np.isfinite(values)] * (1 + 1e-12)


def _through_by_subset(
    tables: CostTables, machines: Sequence[int], limits: FloatArray
) -> Iterator[tuple[frozenset[int], FloatArray]]:
    """Least `through` of a route of exactly each subset, for each limit on its period, [T]."""
    for members, ends in _held_karp(tables, machines, limits):
        yield frozenset(machines[member] for member in members), ends[:, :, -1].min(axis=0)


def _held_karp(
    tables: CostTables, machines: Sequence[int], limits: FloatArray
) -> Iterator[tuple[tuple[int, ...], FloatArray]]:
    """Least sums by subset, smaller ones first: by last machine, limit and layers covered, [n, T, L + 1]."""
    count, size = len(machines), tables.layers + 1
    stages = [tables.stage(machine) for machine in machines]
    totals = [np.where(it.period <= limits[:, None, None], it.total, np.inf) for it in stages]
    hops = [[_bounded_hop(tables, one, other, limits) for other in machines] for one in machines]
    start = np.full((len(limits), size), np.inf)
    start[:, 0] = 0.0
    reached: dict[tuple[int, ...], FloatArray] = {}
    for width in range(1, count + 1):
        for members in combinations(range(count), width):
            ends = np.full((count, len(limits), size), np.inf)
            for last in members:
                rest = tuple(it for it in members if it != last)
                before = start
                if rest:
                    before = np.minimum.reduce([reached[rest][it] + hops[it][last] for it in rest])
                ends[last] = (before[:, :, None] + totals[last]).min(axis=1)
            reached[members] = ends
            yield members, ends


def _bounded_hop(tables: CostTables, one: int, other: int, limits: FloatArray) -> FloatArray:
    """Hop totals by cut, infinite where the hop's period exceeds the limit, [T, L + 1]."""
    total, period = tables.hops.costs(one, other)
    return np.where(period <= limits[:, None], total, np.inf)


def _route(tables: CostTables, machines: Sequence[int], limit: float) -> Route:
    """Route of exactly these machines with the least `through` under that limit of the period."""
    limits = np.array([limit])
    reached = dict(_held_karp(tables, machines, limits))
    left, end, follower = tuple(range(len(machines))), tables.layers, -1
    stages: list[Stage] = []
    while left:
        arrived = reached[left][:, 0, end].copy()
        if follower >= 0:
            arrived += [
                _bounded_hop(tables, machines[it], machines[follower], limits)[0, end] for it in range(len(machines))
            ]
        last = int(np.argmin([arrived[it] if it in left else np.inf for it in range(len(machines))]))
        rest = tuple(it for it in left if it != last)
        first = _first_layer(tables, machines, reached.get(rest), rest, last, end, limits) if rest else 0
        stages.insert(0, Stage(machines[last], first, end - 1))
        left, end, follower = rest, first, last
    return tuple(stages)


def _first_layer(
    tables: CostTables, machines: Sequence[int], ends: FloatArray | None, rest: Sequence[int], last: int, end: int,
    limits: FloatArray,
) -> int:  # fmt: skip
    """First layer of the stage of `last` that ends before layer `end`."""
    assert ends is not None
    before = np.minimum.reduce([ends[it] + _bounded_hop(tables, machines[it], machines[last], limits) for it in rest])
    table = tables.stage(machines[last])
    totals = np.where(table.period[:, end] <= limits[0], table.total[:, end], np.inf)
    return int(np.argmin(before[0] + totals))


def _partitions(
    tables: CostTables, routes: dict[frozenset[int], FastestRoute]
) -> list[tuple[float, tuple[frozenset[int], ...]]]:
    """All partitions of machines into routes (some machines left out), by an upper bound of their score."""
    prices = {subset: float(tables.price_per_second[sorted(subset)].sum()) for subset in routes}
    found: list[tuple[float, tuple[frozenset[int], ...]]] = []

    def extend(chosen: tuple[frozenset[int], ...], left: list[frozenset[int]]) -> None:
        for place, subset in enumerate(left):
            more = (*chosen, subset)
            rate = math.fsum(routes[it].bound for it in more)
            price = math.fsum(prices[it] for it in more)
            rate = min(rate, _rate_bound_by_rounds(tables, more))
            found.append((score(tables, rate, price, len(more), [*frozenset().union(*more)]), more))
            extend(more, [it for it in left[place + 1 :] if not it & subset])

    extend((), sorted(routes, key=sorted))
    return sorted(found, key=lambda it: -it[0])


def _rate_bound_by_rounds(tables: CostTables, subsets: Sequence[frozenset[int]]) -> float:
    """Upper bound on tokens per second from outer rounds, for any split of the layers.

    A machine that holds V bytes of layers sends at least V. A route must send all layers, at best over all its links at
    the same time.
    """
    if len(subsets) < 2:
        return math.inf
    problem = tables.problem
    size = problem.parameters * problem.training.outer_bytes_per_parameter
    links = min(float(tables.link_bytes_per_second[list(subset)].sum()) for subset in subsets)
    return problem.training.round_tokens / (size / links + round_latency(tables, [*frozenset().union(*subsets)]))


def _improve(
    tables: CostTables, fastest: Sequence[Route], bound: float, best: Evaluation | None, budget: Budget
) -> tuple[Evaluation | None, bool]:
    """Return the better of `best` and the best layout of these machines, and whether it is proven to be optimal."""
    first = evaluate(tables, Layout(tuple(fastest)))
    best = first if best is None or first.score > best.score else best
    if first.score >= bound * (1 - _RELATIVE_TOLERANCE):
        return best, True
    counts = [math.factorial(len(it)) * math.comb(tables.layers - 1, len(it) - 1) for it in fastest]
    if max(counts) > _MOST_ROUTES:
        return best, False
    trial = _BranchAndBound(tables, first, [_choices(tables, route) for route in fastest], best, budget)
    trial.descend((), 0.0)
    return trial.best, not trial.ended


@dataclass(frozen=True)
class _Choice:
    """A feasible route, and a lower bound on the time of its busiest link in an outer round."""

    score_rate: float
    floor_seconds: float
    route: Route


@dataclass
class _BranchAndBound:
    """Branch and bound over one choice for each route of a partition."""

    tables: CostTables
    first: Evaluation  # any layout of the partition
    choices: Sequence[Sequence[_Choice]]  # fastest first
    best: Evaluation
    budget: Budget
    ended: bool = False

    def __post_init__(self) -> None:
        machines = self.first.layout.machines
        self.factor = score(self.tables, 1.0, self.first.price_per_second, len(self.choices), machines)
        self.latency = round_latency(self.tables, machines)
        fastest = [it[0].score_rate if it else -math.inf for it in self.choices]
        self.rest = [math.fsum(fastest[place:]) for place in range(len(fastest) + 1)]

    def descend(self, chosen: tuple[_Choice, ...], rate: float) -> None:
        """Try all layouts that begin with `chosen`."""
        depth = len(chosen)
        if depth == len(self.choices):
            tried = evaluate(self.tables, Layout(tuple(it.route for it in chosen)))
            self.best = tried if tried.score > self.best.score else self.best
            return
        tokens = self.tables.problem.training.round_tokens
        for choice in self.choices[depth]:
            together = rate + choice.score_rate
            if self.factor * (together + self.rest[depth + 1]) <= self.best.score * (1 + _RELATIVE_TOLERANCE):
                return
            if self.ended or self.budget.over():
                self.ended = True
                return
            by_rounds = self.factor * tokens / (choice.floor_seconds + self.latency)
            if by_rounds > self.best.score * (1 + _RELATIVE_TOLERANCE):
                self.descend((*chosen, choice), together)


def _choices(tables: CostTables, route: Route) -> list[_Choice]:
    """All feasible routes of exactly the machines of `route`, fastest first."""
    machines = [stage.machine for stage in route]
    size = tables.problem.training.outer_bytes_per_parameter
    rates, parameters = tables.link_bytes_per_second, tables.spans.parameters
    found = []
    for order in permutations(machines):
        for cuts in combinations(range(1, tables.layers), len(machines) - 1):
            ends = (0, *cuts, tables.layers)
            stages = tuple(Stage(it, a, b - 1) for it, a, b in zip(order, ends, ends[1:], strict=False))
            rate = route_cost(tables, stages).score_rate
            if rate:
                floor = max(size * parameters[it.first, it.last + 1] / rates[it.machine] for it in stages)
                found.append(_Choice(rate, float(floor), stages))
    return sorted(found, key=lambda it: -it.score_rate)
