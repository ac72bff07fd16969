"""What the planner is compared with: equal split, random, greedy as Petals, genetic as DT-FM; own code, same evaluator.

Greedy: servers come one by one, each takes as many layers as its memory allows, where the swarm has fewest, and stays
(Borzunov et al., *Distributed inference and fine-tuning of large language models over the internet*, 2023, §3.2).
Genetic: permutations of machines, cut into equal groups with equal stages, tournaments, order crossover, swaps and a
local search over swaps (Yuan et al., *Decentralized training of foundation models in heterogeneous environments*, 2022,
§3), with stages as equal as memory allows, so that small machines are not lost to it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from atoll.coordinator.planner.cost import evaluate, route_cost
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import Layout, Route, Stage

Curve = list[tuple[float, float]]  # seconds, best score so far


def equal_split(tables: CostTables) -> Layout:
    """Neighbours in routes of S machines with equal stages, for the best S."""
    by_region = sorted(range(tables.count), key=lambda it: tables.problem.machines[it].region)
    layouts = [_equal_of(tables, by_region, size) for size in range(1, min(tables.count, tables.layers) + 1)]
    return max(layouts, key=lambda layout: evaluate(tables, layout).score)


def random_layout(tables: CostTables, rng: random.Random, tries: int = 20) -> Layout:
    """Machines in any order, each with a random part of what it could hold; the best of some."""
    layouts = [_random_of(tables, rng) for _ in range(tries)]
    return max(layouts, key=lambda layout: evaluate(tables, layout).score)


def greedy(tables: CostTables, rng: random.Random) -> Layout:
    """As servers of Petals come: each lengthens the route that lacks most layers behind it, the nearest of several."""
    arrivals = list(range(tables.count))
    rng.shuffle(arrivals)
    done: list[Route] = []
    begun: list[Route] = []
    for machine in arrivals:
        ways = [_lengthened(tables, route, machine) for route in begun]
        best = max(
            (way for way in zip(begun, ways, strict=True) if way[1] is not None),
            key=lambda way: (tables.layers - _covered(way[0]), -tables.hops.latency[way[0][-1].machine, machine]),
            default=None,
        )
        route = best[1] if best else _lengthened(tables, (), machine)
        if route is None:
            continue
        if best:
            begun.remove(best[0])
        (done if _covered(route) == tables.layers else begun).append(route)
    return Layout(tuple(done))


def genetic(tables: CostTables, rng: random.Random, seconds: float, population: int = 40) -> tuple[Layout, Curve]:
    """The best of a population that evolves for so long, and how it got there."""
    return _Genetic(tables, rng).run(seconds, population)


@dataclass(frozen=True)
class _Chromosome:
    """A chromosome: how long routes are, and the order of machines that is cut into them."""

    size: int
    order: tuple[int, ...]


class _Genetic:
    def __init__(self, tables: CostTables, rng: random.Random) -> None:
        self.tables, self.rng = tables, rng
        self.longest = min(tables.count, tables.layers)
        self.known: dict[tuple[int, ...], tuple[float, Route]] = {}

    def run(self, seconds: float, population: int) -> tuple[Layout, Curve]:
        start, curve = time.monotonic(), []
        people = [self._new() for _ in range(population)]
        worth = [self._fitness(it) for it in people]
        while time.monotonic() - start < seconds:
            one, other = self._tournament(worth), self._tournament(worth)
            child = self._improved(self._crossed(people[one], people[other]))
            value, weakest = self._fitness(child), min(range(population), key=lambda it: worth[it])
            if value > worth[weakest]:
                people[weakest], worth[weakest] = child, value
            if not curve or max(worth) > curve[-1][1]:
                curve.append((time.monotonic() - start, max(worth)))
        best = people[max(range(population), key=lambda it: worth[it])]
        return Layout(tuple(route for _, route in self._routes(best) if route)), curve

    def _new(self) -> _Chromosome:
        order = list(range(self.tables.count))
        self.rng.shuffle(order)
        return _Chromosome(self.rng.randint(1, self.longest), tuple(order))

    def _routes(self, person: _Chromosome) -> list[tuple[float, Route]]:
        order, size = person.order, person.size
        return [self._route(order[place : place + size]) for place in range(0, len(order), size)]

    def _route(self, group: tuple[int, ...]) -> tuple[float, Route]:
        found = self.known.get(group)
        if found is None:
            route = as_equal_as_fits(self.tables, group)
            rate = route_cost(self.tables, route).score_rate if route else 0.0
            found = self.known[group] = rate, route if rate else ()
        return found

    def _fitness(self, person: _Chromosome) -> float:
        return sum(rate for rate, _ in self._routes(person))

    def _tournament(self, worth: Sequence[float]) -> int:
        return max(self.rng.sample(range(len(worth)), 3), key=lambda it: worth[it])

    def _crossed(self, one: _Chromosome, other: _Chromosome) -> _Chromosome:
        """A piece of one in its place, the rest in the order of the other; the length of either, at times one off."""
        start, end = sorted(self.rng.sample(range(len(one.order) + 1), 2))
        kept = set(one.order[start:end])
        rest = [it for it in other.order if it not in kept]
        size = self.rng.choice((one.size, other.size)) + self.rng.choice((0, 0, 0, 0, 1, -1))
        order = (*rest[:start], *one.order[start:end], *rest[start:])
        return _Chromosome(min(max(1, size), self.longest), order)

    def _improved(self, person: _Chromosome, tries: int = 10) -> _Chromosome:
        """Swaps that do not make it worse."""
        value = self._fitness(person)
        for _ in range(tries):
            order = list(person.order)
            one, other = self.rng.sample(range(len(order)), 2)
            order[one], order[other] = order[other], order[one]
            swapped = _Chromosome(person.size, tuple(order))
            tried = self._fitness(swapped)
            if tried >= value:
                person, value = swapped, tried
        return person


def as_equal_as_fits(tables: CostTables, order: Sequence[int]) -> Route:
    """Equal stages, less for whom they do not fit; empty where the layers do not all fit."""
    most = [tables.stage(machine).most_layers for machine in order]
    if sum(most) < tables.layers or not all(most):
        return ()
    held = [0] * len(order)
    for _ in range(tables.layers):
        place = min((it for it in range(len(order)) if held[it] < most[it]), key=lambda it: held[it])
        held[place] += 1
    return _stages(order, held) if all(held) else ()


def _equal_of(tables: CostTables, machines: Sequence[int], size: int) -> Layout:
    held = [tables.layers // size + (place < tables.layers % size) for place in range(size)]
    able = [machine for machine in machines if tables.stage(machine).most_layers >= held[0]]
    routes = [_stages(able[place : place + size], held) for place in range(0, len(able) - size + 1, size)]
    return Layout(tuple(route for route in routes if route_cost(tables, route).score_rate))


def _random_of(tables: CostTables, rng: random.Random) -> Layout:
    order = list(range(tables.count))
    rng.shuffle(order)
    routes: list[Route] = []
    members: list[int] = []
    held: list[int] = []
    for machine in order:
        most = tables.stage(machine).most_layers
        if not most:
            continue
        members.append(machine)
        held.append(min(rng.randint(1, most), tables.layers - sum(held)))
        if sum(held) == tables.layers:
            routes.append(_stages(members, held))
            members, held = [], []
    return Layout(tuple(route for route in routes if route_cost(tables, route).score_rate))


def _lengthened(tables: CostTables, route: Route, machine: int) -> Route | None:
    """The route with as many further layers as the machine can hold; None where it can hold none there."""
    start = _covered(route)
    if route and not tables.hops.usable[route[-1].machine, machine]:
        return None
    period = tables.stage(machine).period[start]
    ends = [end for end in range(start + 1, tables.layers + 1) if period[end] < float("inf")]
    return (*route, Stage(machine, start, ends[-1] - 1)) if ends else None


def _covered(route: Route) -> int:
    return route[-1].last + 1 if route else 0


def _stages(order: Sequence[int], held: Sequence[int]) -> Route:
    ends = [0]
    for count in held:
        ends.append(ends[-1] + count)
    return tuple(Stage(machine, a, b - 1) for machine, (a, b) in zip(order, pairwise(ends), strict=True))
