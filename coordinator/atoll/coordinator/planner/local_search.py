"""Local search: changes a layout move by move while the budget lasts, and keeps the best one. Pure.

Moves: swap two machines; move a machine next to a near one in the same or another route; add an unplaced machine;
remove a machine; change the order of a route, or its cuts where the outer round is the bottleneck; and rebuild a few
near routes from their machines, which also divides and merges routes (ruin and recreate; Schrimpf et al., *Record
breaking optimization results*, 2000). Every changed route is split anew by dynamic programming (`splits.py`). A move
that lowers the score a little is accepted with a probability that falls over time (simulated annealing; Kirkpatrick et
al., 1983).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from atoll.coordinator.planner.budget import Budget
from atoll.coordinator.planner.cost import (
    Evaluation,
    evaluate,
    layer_holders,
    link_seconds,
    round_latency,
    route_cost,
    score,
)
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.exchange_time import (
    finish_seconds_per_byte,
    largest_shares,
    link_seconds_per_byte,
    reducer_mask,
)
from atoll.coordinator.planner.problem import FloatArray, Layout, Stage
from atoll.coordinator.planner.route_builder import ALL_ORDERS, Order, RouteBuilder
from atoll.coordinator.planner.splits import Split

_INITIAL_TEMPERATURE = 0.1  # × a route's average score: the loss that is accepted at the start
_ROUND_BOUND_THRESHOLD = 0.8  # of the interval: a longer round enters every comparison
_ROUND_LIMIT_FACTORS = (1.0, 0.75, 0.55, 0.4, 0.25)  # × the current round
_RECUT_PROBABILITY = 0.25  # of a move that changes cuts, if the round is the bottleneck
_KEEP_ORDER_PROBABILITY = 0.3  # in that case: a route's fastest order need not be best for the whole layout
_REFINE_CUTS_PROBABILITY = 0.15  # in that case: probability of trying the cuts of a move one by one
_NEIGHBOURS = 24  # nearest machines that moves combine with a machine
_SMALL_SWARM_MACHINES = 40  # up to this size every accepted layout is evaluated in full
_ROUND_CHECK_MOVES = 200  # accepted moves between full evaluations in a larger swarm


@dataclass(frozen=True)
class Move:
    """Routes to remove, by index, and orders of machines to add as routes instead."""

    removed: frozenset[int]
    orders: tuple[Order, ...]
    splits: tuple[Split, ...] = ()  # replaces `orders` if the routes are already split
    rest: Order = ()  # one more route, added if it is feasible


class Search:
    """A search over layouts of `machines`, started from `routes`.

    `tables` evaluate layouts. The tables of `builder` say which spans are allowed: the same spans, or fewer. Where the
    outer round is the bottleneck of a small swarm, every comparison evaluates whole layouts; in a large one it uses an
    estimate (`RouteRoundTime`).
    """

    def __init__(
        self,
        tables: CostTables,
        builder: RouteBuilder,
        machines: Sequence[int],
        routes: Sequence[Split],
        rng: random.Random,
    ) -> None:
        self.builder = builder
        self.tables = tables
        self.rng = rng
        self.machines = list(machines)
        self.routes = list(routes)
        self._near = _nearest_machines(builder.distance, self.machines)
        self._round_time: RouteRoundTime | None = None  # set once the round is the bottleneck, or nearly is
        self._round_limited_builders: list[RouteBuilder] = []  # used from then on; they split for shorter rounds
        self._best = list(self.routes)
        self._score = self._best_score = self._score_of(self.routes)
        self._check_round()
        self._accepted = 0
        self._index()

    def run(self, budget: Budget) -> Evaluation:
        """Apply moves until the budget is over; returns the best layout seen."""
        moves = (self._swap, self._shift, self._join, self._leave, self._reorder, self._rebuild)
        weights = (4, 4, 2, 1, 2, 3)
        while not budget.over():
            recut = self._round_time is not None and self.rng.random() < _RECUT_PROBABILITY
            move = self._recut() if recut else self.rng.choices(moves, weights)[0]()
            if move is not None:
                self._consider(move, budget.spent())
        return self.best()

    def best(self) -> Evaluation:
        """The best layout so far, evaluated in full."""
        return evaluate(self.tables, Layout(tuple(split.route for split in self._best)))

    def _consider(self, move: Move, spent: float) -> None:
        splits = move.splits or tuple(self._split_of(order) for order in move.orders)
        if any(not split.score_rate for split in splits):
            return
        rest = self._split_of(move.rest) if move.rest else None
        splits += (rest,) if rest is not None and rest.score_rate else ()
        others = [split for place, split in enumerate(self.routes) if place not in move.removed]
        if self._is_round_bound() and self.rng.random() < _REFINE_CUTS_PROBABILITY:
            splits = self._refine_cuts(others, list(splits))
        routes = others + list(splits)
        worth = self._score_of(routes)
        share = self._score / max(1, len(self.routes))
        temperature = _INITIAL_TEMPERATURE * share * (1 - spent) ** 2
        loss = self._score - worth
        if loss > 0 and (temperature <= 0 or self.rng.random() >= math.exp(-loss / temperature)):
            return
        self.routes, self._score = routes, worth
        self._index()
        if worth > self._best_score:
            self._best, self._best_score = list(routes), worth
        self._accepted += 1
        few = len(self.machines) <= _SMALL_SWARM_MACHINES
        if (few and self._round_time is None) or (not few and self._accepted % _ROUND_CHECK_MOVES == 0):
            self._check_round()

    def _refine_cuts(self, others: list[Split], changed: list[Split]) -> tuple[Split, ...]:
        """Move the cuts of the changed routes by one layer for as long as that raises the layout's score."""
        worth, better = self._score_of(others + changed), True
        while better:
            better = False
            cuts = [(place, cut) for place, split in enumerate(changed) for cut in range(1, len(split.route))]
            for (place, cut), by in product(cuts, (-1, 1)):
                moved = self._with_cut(changed[place], cut, changed[place].route[cut].first + by)
                tried = [*changed[:place], moved, *changed[place + 1 :]] if moved else changed
                value = self._score_of(others + tried) if moved else 0.0
                if value > worth:
                    changed, worth, better = tried, value, True
        return tuple(changed)

    def _with_cut(self, split: Split, cut: int, first: int) -> Split | None:
        """Return the route with stage number `cut` starting at layer `first`; None if that is infeasible."""
        stages = list(split.route)
        before, after = stages[cut - 1], stages[cut]
        if not before.first < first <= after.last:
            return None
        stages[cut - 1 : cut + 1] = [replace(before, last=first - 1), replace(after, first=first)]
        cost = route_cost(self.builder.tables, tuple(stages))
        return Split(cost.score_rate, tuple(stages), cost.price_per_second) if cost.score_rate else None

    def _split_of(self, order: Order) -> Split:
        """Best split of that order; also of all its orders, or of both directions, if that is cheap."""
        builder = self.rng.choice((self.builder, *self._round_limited_builders))
        keep_order = self._is_round_bound() and self.rng.random() < _KEEP_ORDER_PROBABILITY
        if len(order) <= ALL_ORDERS and not keep_order:
            return builder.best_order(order, self.rng)
        forward = builder.split(order)
        if keep_order or len(self.machines) > _SMALL_SWARM_MACHINES:
            return forward
        reverse = builder.split(order[::-1])
        return reverse if reverse.score_rate > forward.score_rate else forward

    def _check_round(self) -> None:
        known = evaluate(self.tables, Layout(tuple(split.route for split in self.routes)))
        longest = max(known.round.busy_seconds.values(), default=0.0) if known.round.busiest is not None else 0.0
        if longest > _ROUND_BOUND_THRESHOLD * known.round.interval_seconds:
            self._round_time = RouteRoundTime(self.tables, known)
            if len(self.machines) <= _SMALL_SWARM_MACHINES and not self._round_limited_builders:
                limits = [share * known.round.seconds for share in _ROUND_LIMIT_FACTORS]
                self._round_limited_builders = [
                    RouteBuilder(self.builder.tables.with_round_limit(limit)) for limit in limits
                ]
            self._score, self._best_score = self._score_of(self.routes), self._score_of(self._best)

    def _score_of(self, routes: Sequence[Split]) -> float:
        if not routes:
            return 0.0
        if self._is_round_bound():
            return evaluate(self.tables, Layout(tuple(split.route for split in routes))).score
        used = [stage.machine for split in routes for stage in split.route] if self.tables.pins else []
        rate, price = sum(split.score_rate for split in routes), sum(split.price_per_second for split in routes)
        if self._round_time is not None:
            seconds = max(self._round_time.seconds(split) for split in routes)
            rate = min(rate, self.tables.problem.training.round_tokens / seconds)
        return score(self.tables, rate, price, len(routes), used)

    def _is_round_bound(self) -> bool:
        """True if the round is (nearly) the bottleneck of a small swarm: a route's own rate is then no useful score."""
        return self._round_time is not None and len(self.machines) <= _SMALL_SWARM_MACHINES

    def _index(self) -> None:
        self._place = {stage.machine: place for place, split in enumerate(self.routes) for stage in split.route}
        self._unplaced = [machine for machine in self.machines if machine not in self._place]

    def _pair(self) -> tuple[int, int] | None:
        """Pick a placed machine, and another one near it or anywhere."""
        if not self._place or len(self.machines) < 2:
            return None
        one = self.rng.choice(list(self._place)) if len(self._place) < 64 else _random_machine(self.routes, self.rng)
        near = self._near[one]
        other = self.rng.choice(near if self.rng.random() < 0.8 else self.machines)
        return (one, other) if other != one else None

    def _order(self, place: int) -> Order:
        return tuple(stage.machine for stage in self.routes[place].route)

    def _swap(self) -> Move | None:
        pair = self._pair()
        if pair is None:
            return None
        one, other = pair
        from_route, to_route = self._place[one], self._place.get(other)
        if to_route is None:
            return Move(frozenset({from_route}), (_replaced(self._order(from_route), one, other),))
        if from_route == to_route:
            order = _replaced(_replaced(_replaced(self._order(from_route), one, -1), other, one), -1, other)
            return Move(frozenset({from_route}), (order,))
        orders = _replaced(self._order(from_route), one, other), _replaced(self._order(to_route), other, one)
        return Move(frozenset({from_route, to_route}), orders)

    def _shift(self) -> Move | None:
        """Move a machine next to another one, in its own or in another route.

        Its own route is removed if it becomes empty.
        """
        pair = self._pair()
        if pair is None or pair[1] not in self._place:
            return None
        moving, beside = pair
        from_route, to_route = self._place[moving], self._place[beside]
        rest = tuple(it for it in self._order(from_route) if it != moving)
        target = _inserted(rest if from_route == to_route else self._order(to_route), beside, moving, self.rng)
        return Move(frozenset({from_route, to_route}), (target,), rest=() if from_route == to_route else rest)

    def _join(self) -> Move | None:
        """Add an unplaced machine to a route, or as a separate route."""
        if not self._unplaced:
            return None
        joining = self.rng.choice(self._unplaced)
        if self.rng.random() < 0.2 or len(self.machines) < 2 or not self._place:
            return Move(frozenset(), ((joining,),))
        beside = self.rng.choice(self._near[joining])
        if beside not in self._place:
            return None
        to_route = self._place[beside]
        return Move(frozenset({to_route}), (_inserted(self._order(to_route), beside, joining, self.rng),))

    def _leave(self) -> Move | None:
        if not self.routes:
            return None
        place = self.rng.randrange(len(self.routes))
        order = self._order(place)
        leaving = self.rng.choice(order)
        rest = tuple(it for it in order if it != leaving)
        return Move(frozenset({place}), (rest,) if rest else ())

    def _reorder(self) -> Move | None:
        if not self.routes:
            return None
        place = self.rng.randrange(len(self.routes))
        order = self._order(place)
        if len(order) < 2:
            return None
        if self.rng.random() < 0.2:
            return Move(frozenset({place}), (self.builder.path(order),))
        start, end = sorted(self.rng.sample(range(len(order) + 1), 2))
        return Move(frozenset({place}), (order[:start] + order[start:end][::-1] + order[end:],))

    def _recut(self) -> Move | None:
        """Move one cut of a route: if the round is the bottleneck, the fastest split need not be the best."""
        long = [place for place, split in enumerate(self.routes) if len(split.route) > 1]
        if not long:
            return None
        place = self.rng.choice(long)
        stages = self.routes[place].route
        cut = self.rng.randrange(1, len(stages))
        first = self.rng.randint(stages[cut - 1].first + 1, stages[cut].last)
        split = self._with_cut(self.routes[place], cut, first) if first != stages[cut].first else None
        return Move(frozenset({place}), (), (split,)) if split else None

    def _rebuild(self) -> Move | None:
        """Rebuild some near routes together with some unplaced machines."""
        removed: set[int] = set()
        if self._place and self.rng.random() < 0.9:
            centre = _random_machine(self.routes, self.rng)
            near = (
                self._near[centre]
                if self.rng.random() < 0.7
                else self.rng.sample(self.machines, min(8, len(self.machines)))
            )
            beside = [self._place[it] for it in near if it in self._place]
            removed = {self._place[centre], *beside[: self.rng.randrange(4)]}
        pool = [machine for place in removed for machine in self._order(place)]
        pool += self.rng.sample(self._unplaced, min(len(self._unplaced), self.rng.randrange(9)))
        splits = self.builder.random_routes(pool, self.rng) if pool else []
        return Move(frozenset(removed), (), tuple(splits)) if splits else None


class RouteRoundTime:
    """Estimate of the outer round's time by route, with the exchange levels of the layout `known`.

    The levels (`exchange_time.py`) depend on all holders of a layer, and change little when one of many changes. So a
    search over a large swarm computes them from time to time, and compares routes by their own links.
    """

    def __init__(self, tables: CostTables, known: Evaluation) -> None:
        holders = layer_holders(tables, known.layout)
        reduces = reducer_mask(tables.dialable[holders])
        self._tables = tables
        self._level = finish_seconds_per_byte(tables.link_bytes_per_second[holders], reduces)
        self._most = largest_shares(reduces)[:, 0]
        self._routes = len(known.layout.routes)
        self._interval = known.round.interval_seconds
        self._latency = round_latency(tables, known.layout.machines)
        self._seen: dict[int, tuple[Split, float]] = {}

    def seconds(self, split: Split) -> float:
        """Seconds until the last link of this route is done with exchange and activations."""
        found = self._seen.get(id(split))
        if found is None:
            seconds = max(self._stage(stage, split.score_rate) for stage in split.route) + self._latency
            found = self._seen[id(split)] = split, seconds  # the reference keeps the id from being reused
        return found[1]

    def _stage(self, stage: Stage, rate: float) -> float:
        tables, span = self._tables, slice(stage.first, stage.last + 1)
        level, largest = self._level[span], self._most[span]
        reduces = np.full(level.shape, tables.dialable[stage.machine])
        per_byte = link_seconds_per_byte(
            level, np.full(level.shape, tables.link_bytes_per_second[stage.machine]), reduces, largest, self._routes
        )
        own = self._interval * rate * link_seconds(tables, stage.machine, stage.first, stage.last + 1)
        return float((per_byte * tables.layer_bytes[span]).sum()) + own


def _replaced(order: Order, one: int, other: int) -> Order:
    return tuple(other if it == one else it for it in order)


def _inserted(order: Order, beside: int, moving: int, rng: random.Random) -> Order:
    """Insert a machine before or after `beside`."""
    place = order.index(beside) + rng.randrange(2)
    return (*order[:place], moving, *order[place:])


def _random_machine(routes: Sequence[Split], rng: random.Random) -> int:
    return rng.choice(rng.choice(routes).route).machine


def _nearest_machines(distance: FloatArray, machines: Sequence[int]) -> dict[int, list[int]]:
    """Up to `_NEIGHBOURS` nearest of these machines, by machine."""
    members = np.array(machines)
    between = distance[np.ix_(members, members)].copy()
    np.fill_diagonal(between, np.inf)
    count = min(_NEIGHBOURS, len(members) - 1)
    nearest = np.argpartition(between, max(0, count - 1), axis=1)[:, :count]
    return {int(machine): members[row].tolist() for machine, row in zip(members, nearest, strict=True)}
