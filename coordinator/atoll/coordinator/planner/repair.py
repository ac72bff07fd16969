"""Repairs a layout with few moves after machines left, shrank or joined. Pure.

Intact routes stay. In a broken route a spare machine takes the place of the missing one, with the same layers; else the
neighbours of the gap share its layers; else the remaining machines get a new split. Machines without a place form new
routes, around pins first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.coordinator.planner.cost import route_cost
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import Layout, Problem, Route, Stage
from atoll.coordinator.planner.question import NamedRoute
from atoll.coordinator.planner.route_builder import Order, RouteBuilder
from atoll.coordinator.planner.splits import best_split

_Gap = tuple[int, int]  # first layer, and the layer after the last
_Step = int | _Gap  # a pinned machine, or layers that free machines must hold


@dataclass(frozen=True)
class Slot:
    """A span in a route. `machine` is None if the layers have lost their holder."""

    machine: int | None
    first: int
    last: int


def intact_routes(tables: CostTables, current: Sequence[NamedRoute]) -> Layout:
    """The routes that can continue unchanged."""
    return Layout(tuple(route for named in current if (route := _if_feasible(tables, _slots(tables, named)))))


def repair_layout(tables: CostTables, current: Sequence[NamedRoute]) -> Layout:
    """The intact routes, and the broken ones as far as they can be repaired."""
    found = list(intact_routes(tables, current).routes)
    broken = [named for named in current if not _if_feasible(tables, _slots(tables, named))]
    places = _index_by_name(tables.problem)
    left = {places[name] for named in broken for name, _, _ in named if name in places}
    spares = set(range(tables.count)) - left - {stage.machine for route in found for stage in route}
    for named in broken:
        route = _with_gaps_filled(tables, _slots(tables, named), spares) or _resplit(tables, named)
        if route:
            found.append(route)
            spares -= {stage.machine for stage in route}
    return Layout(tuple(found))


def extend_layout(tables: CostTables, layout: Layout) -> Layout:
    """Add routes of machines without a place, if they can form any."""
    free = set(range(tables.count)) - set(layout.machines)
    pinned = _routes_around_pins(tables, free) if any(tables.pins.values()) else []
    free -= {stage.machine for route in pinned for stage in route}
    fresh = RouteBuilder(tables).first_routes(sorted(free)) if free else []
    return Layout((*layout.routes, *pinned, *(split.route for split in fresh)))


def _index_by_name(problem: Problem) -> dict[str, int]:
    return {machine.name: index for index, machine in enumerate(problem.machines)}


def _slots(tables: CostTables, named: NamedRoute) -> list[Slot]:
    places = _index_by_name(tables.problem)
    slots = []
    for name, first, last in named:
        machine = places.get(name)
        able = machine is not None and np.isfinite(tables.stage(machine).period[first, last + 1])
        slots.append(Slot(machine if able else None, first, last))
    return slots


def _route(slots: Sequence[Slot]) -> Route:
    """Convert slots to a route; empty if a slot has no holder."""
    stages = tuple(Stage(slot.machine, slot.first, slot.last) for slot in slots if slot.machine is not None)
    return stages if len(stages) == len(slots) else ()


def _if_feasible(tables: CostTables, slots: Sequence[Slot]) -> Route:
    """The route if all slots have holders that reach each other; otherwise an empty route."""
    route = _route(slots)
    return route if route and route_cost(tables, route).score_rate else ()


def _with_gaps_filled(tables: CostTables, slots: Sequence[Slot], spares: Collection[int]) -> Route:
    by_spares = _if_feasible(tables, _with_spares(tables, slots, spares))
    return by_spares or _if_feasible(tables, _absorb_gaps(tables, slots))


def _with_spares(tables: CostTables, slots: Sequence[Slot], spares: Collection[int]) -> list[Slot]:
    """Fill each gap with the spare that computes its layers fastest."""
    free, filled = set(spares), []
    for slot in slots:
        if slot.machine is None:
            times = {it: float(tables.stage(it).total[slot.first, slot.last + 1]) for it in sorted(free)}
            best = min(times, key=lambda it: times[it], default=None)
            if best is None or not np.isfinite(times[best]):
                return list(slots)
            free.remove(best)
            slot = replace(slot, machine=best)
        filled.append(slot)
    return filled


def _absorb_gaps(tables: CostTables, slots: Sequence[Slot]) -> list[Slot]:
    """Divide each gap's layers between its neighbours so that the slower neighbour is as fast as possible."""
    kept: list[Slot] = [slot for slot in slots if slot.machine is not None]
    if not kept:
        return list(slots)
    kept[0] = replace(kept[0], first=slots[0].first)
    kept[-1] = replace(kept[-1], last=slots[-1].last)
    for place in range(len(kept) - 1):
        before, after = kept[place], kept[place + 1]
        cuts = range(before.last, after.first)
        last = min(cuts, key=lambda cut: _slower(tables, before, after, cut))
        kept[place], kept[place + 1] = replace(before, last=last), replace(after, first=last + 1)
    return kept


def _slower(tables: CostTables, before: Slot, after: Slot, last: int) -> float:
    """Longer period of two neighbours if the first one ends with layer `last`."""
    assert before.machine is not None
    assert after.machine is not None
    one = tables.stage(before.machine).period[before.first, last + 1]
    other = tables.stage(after.machine).period[last + 1, after.last + 1]
    return float(max(one, other))


def _resplit(tables: CostTables, named: NamedRoute) -> Route:
    """Split the layers again over the remaining machines of a route, in their order."""
    places = _index_by_name(tables.problem)
    order = [places[name] for name, _, _ in named if name in places]
    return best_split(tables, order).route if order else ()


def _routes_around_pins(tables: CostTables, machines: Collection[int]) -> list[Route]:
    """Build as many routes as possible that give pinned machines their spans; random moves seldom find one.

    Pinned spans form a chain that leaves as few layers uncovered as possible: a shortest path over layers, where a
    pinned span costs 0 and an uncovered layer costs 1. Free machines fill the gaps, those with the most memory first.
    """
    free = set(machines)
    found: list[Route] = []
    while True:
        pinned = [machine for machine in sorted(free) if _pin_of(tables, machine) is not None]
        order = _fill_gaps(tables, _pin_chain(tables, pinned), sorted(free - set(pinned))) if pinned else ()
        route = best_split(tables, order).route if order else ()
        if not route:
            return found
        found.append(route)
        free -= {stage.machine for stage in route}


def _pin_of(tables: CostTables, machine: int) -> tuple[int, int] | None:
    return tables.pins.get(tables.problem.machines[machine].name)


def _pin_chain(tables: CostTables, pinned: Iterable[int]) -> list[_Step]:
    """Sequence of pinned machines and gaps over all layers, with the fewest layers in gaps."""
    spans = {machine: span for machine in pinned if (span := _pin_of(tables, machine)) is not None}
    least: list[tuple[int, list[_Step]]] = [(0, [])]
    for end in range(1, tables.layers + 1):
        cost, steps = least[end - 1]
        before = steps[-1] if steps else None
        gap = (before[0], end) if isinstance(before, tuple) else (end - 1, end)
        ways = [(cost + 1, [*(steps[:-1] if isinstance(before, tuple) else steps), gap])]
        ways += [(least[first][0], [*least[first][1], it]) for it, (first, last) in spans.items() if last + 1 == end]
        least.append(min(ways, key=lambda way: way[0]))
    return least[-1][1]


def _fill_gaps(tables: CostTables, chain: list[_Step], free: Iterable[int]) -> Order:
    """Fill the gaps with free machines; empty if these are too few, or if the chain has no pinned machine."""
    sizes = {machine: tables.stage(machine).most_layers for machine in free}
    spare = sorted((it for it in sizes if sizes[it]), key=lambda it: sizes[it])
    order: list[int] = []
    for step in chain:
        if isinstance(step, int):
            order.append(step)
            continue
        missing = step[1] - step[0]
        while missing > 0:
            if not spare:
                return ()
            order.append(spare.pop())
            missing -= sizes[order[-1]]
    return tuple(order) if any(isinstance(step, int) for step in chain) else ()
