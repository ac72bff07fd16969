"""Builds first routes from a pool of machines: groups with enough memory, each in an order of short hops. Pure.

Near machines are grouped first; machines left over are grouped again with a larger distance. Several numbers of routes
are tried for a pool: from as many as its memory allows (short routes have fewer hops) down to few (whose splits follow
speed instead of memory). Groups are formed in two ways: with equal memory, and with machines of similar speed, so that
a slow link slows only other slow ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import permutations

import numpy as np

from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import FloatArray
from atoll.coordinator.planner.regions import groups_within
from atoll.coordinator.planner.splits import Split, best_split

GROUPING_RTT_SECONDS = (0.01, 0.03, 0.08, 0.2, 10.0)
_ROUTE_COUNT_FACTORS = (1.0, 0.85, 0.7, 0.5, 0.3)  # × the most routes that a pool's memory allows
ALL_ORDERS = 3  # up to this number of machines in a group, all orders are tried
_SMALL_POOL_MACHINES = 12  # up to this size a random pool may leave out most of its machines
_ORDERS_TRIED = 6  # changes that are tried to the order of a larger group
_SPLITS_REMEMBERED = 200_000

Order = tuple[int, ...]


class RouteBuilder:
    """Builds routes, and remembers the best split of each order of machines."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self._splits: dict[Order, Split] = {}
        self._layers = np.array([tables.stage(machine).most_layers for machine in range(tables.count)])
        self._speed = np.array([self._max_micro_batches_per_second(machine) for machine in range(tables.count)])
        cut = float(np.median(tables.spans.cut_bytes_per_token[1:-1])) if tables.layers > 1 else 0.0
        self.distance: FloatArray = tables.hops.total_per_byte * cut + tables.hops.latency + tables.hops.penalty

    def split(self, order: Order) -> Split:
        """Best split over that order."""
        known = self._splits.get(order)
        if known is None:
            if len(self._splits) >= _SPLITS_REMEMBERED:
                self._splits.clear()
            enough = self._layers[list(order)].sum() >= self.tables.layers
            known = self._splits[order] = best_split(self.tables, order if enough else ())
        return known

    def first_routes(self, machines: Sequence[int]) -> list[Split]:
        """Build routes from all these machines: near ones first, then those left over at larger distances."""
        singles: list[int] = []
        left: list[int] = []
        for machine in machines:
            alone = self.split((machine,))
            (singles if alone.score_rate else left).append(machine)
        routes = [self.split((machine,)) for machine in singles]
        for within in GROUPING_RTT_SECONDS:
            remaining: list[int] = []
            for pool in groups_within(self.tables.problem, left, within):
                made = self.best_of_pool(pool)
                routes += made
                used = {stage.machine for split in made for stage in split.route}
                remaining += [machine for machine in pool if machine not in used]
            left = remaining
        return routes

    def best_of_pool(self, pool: Sequence[int]) -> list[Split]:
        """Best of several ways to build routes from one pool; empty if its memory is too small."""
        most = int(self._layers[list(pool)].sum() // self.tables.layers)
        counts = sorted({max(1, round(most * share)) for share in _ROUTE_COUNT_FACTORS}) if most else []
        trials = [
            self._routes(groups)
            for count in counts
            for groups in (self._by_memory(pool, count), self._by_speed(pool, count))
        ]
        return max(trials, key=lambda routes: sum(it.score_rate for it in routes), default=[])

    def random_routes(self, pool: Sequence[int], rng: random.Random) -> list[Split]:
        """Build routes from a random part of a pool, grouped in a random way."""
        likely = rng.uniform(0.3 if len(pool) <= _SMALL_POOL_MACHINES else 0.8, 1.0) if rng.random() < 0.5 else 1.0
        kept = [it for it in pool if rng.random() < likely]
        rng.shuffle(kept)
        singles = [it for it in kept if self._layers[it] == self.tables.layers and rng.random() < 0.6]
        rest = [it for it in kept if it not in singles]
        most = int(self._layers[rest].sum() // self.tables.layers) if rest else 0
        groups: list[list[int]] = []
        if most:
            count = rng.randint(max(1, most // 2), most)
            groups = (self._by_memory, self._by_speed, self._random)[rng.randrange(3)](rest, count)
        splits = [self.best_order(group, rng) for group in [*([it] for it in singles), *groups] if group]
        return [split for split in splits if split.score_rate]

    def best_order(self, group: Sequence[int], rng: random.Random) -> Split:
        """Find a good order: the best of all for a small group, else the best of a short path and its changes."""
        if len(group) <= ALL_ORDERS:
            return max((self.split(order) for order in permutations(group)), key=lambda it: it.score_rate)
        best = self.split(self.path(group))
        for _ in range(_ORDERS_TRIED):
            order = [stage.machine for stage in best.route] or list(group)
            one, other = rng.sample(range(len(order)), 2)
            order.insert(other, order.pop(one))
            tried = self.split(tuple(order))
            best = tried if tried.score_rate > best.score_rate else best
        return best

    def path(self, group: Iterable[int]) -> Order:
        """Order a group as an open path of short hops, with trusted machines at both ends if required."""
        members = sorted(set(group))
        if len(members) < 3:
            return self._with_trusted_ends(members)
        distance = self.distance[np.ix_(members, members)]
        best, length = list(range(len(members))), np.inf
        for start in range(min(len(members), 8)):
            path, total = _nearest_next(distance, start)
            if total < length:
                best, length = path, total
        return self._with_trusted_ends([members[it] for it in best])

    def _routes(self, groups: Iterable[Sequence[int]]) -> list[Split]:
        splits = [self.split(self.path(group)) for group in groups if group]
        return [split for split in splits if split.score_rate]

    def _by_memory(self, pool: Sequence[int], count: int) -> list[list[int]]:
        """Group machines, largest memory first, each into the group that has the least memory."""
        groups: list[list[int]] = [[] for _ in range(count)]
        held = np.zeros(count)
        for machine in sorted(pool, key=lambda it: -self._layers[it]):
            least = int(np.argmin(held))
            groups[least].append(machine)
            held[least] += self._layers[machine]
        return groups

    def _by_speed(self, pool: Sequence[int], count: int) -> list[list[int]]:
        """Group machines, fastest first, into chunks that each have enough memory."""
        return self._chunks(sorted(pool, key=lambda it: -self._speed[it]), count)

    def _random(self, pool: Sequence[int], count: int) -> list[list[int]]:
        return self._chunks(list(pool), count)

    def _chunks(self, ordered: Sequence[int], count: int) -> list[list[int]]:
        enough = max(self.tables.layers, self._layers[list(ordered)].sum() / count)
        groups: list[list[int]] = [[]]
        held = 0
        for machine in ordered:
            if held >= enough and len(groups) < count:
                groups.append([])
                held = 0
            groups[-1].append(machine)
            held += self._layers[machine]
        return groups

    def _max_micro_batches_per_second(self, machine: int) -> float:
        """Highest rate of micro-batches that the machine reaches, with its cheapest span."""
        period = self.tables.stage(machine).period
        finite = period[np.isfinite(period)]
        return float(1 / finite.min()) if finite.size and finite.min() > 0 else 0.0

    def _with_trusted_ends(self, path: list[int]) -> Order:
        problem = self.tables.problem
        if not problem.wishes.trusted_ends or len(path) < 2:
            return tuple(path)
        trusted = [it for it in path if problem.machines[it].trusted]
        if len(trusted) < 2:
            return tuple(path)
        ends = (trusted[0], trusted[-1])
        return (ends[0], *(it for it in path if it not in ends), ends[1])


def _nearest_next(distance: FloatArray, start: int) -> tuple[list[int], float]:
    """Path from `start` that always continues to the nearest machine not yet on it, and its length."""
    path, total = [start], 0.0
    left = np.ones(len(distance), dtype=bool)
    left[start] = False
    while len(path) < len(distance):
        options = np.where(left, distance[path[-1]], np.inf)
        following = int(np.argmin(options))
        if not left[following]:
            following = int(np.flatnonzero(left)[0])
        total += float(distance[path[-1], following])
        left[following] = False
        path.append(following)
    return path, total
