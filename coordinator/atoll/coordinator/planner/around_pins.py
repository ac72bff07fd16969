"""Builds routes through machines that are pinned to spans; random moves seldom find one. Pure.

Pinned spans form a chain that leaves as few layers uncovered as possible: a shortest path over layers, where a pinned
span costs 0 and an uncovered layer costs 1. Free machines fill the gaps, those with the most memory first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import Route
from atoll.coordinator.planner.route_builder import Order
from atoll.coordinator.planner.splits import best_split

Gap = tuple[int, int]  # from layer, up to layer (exclusive)
Step = int | Gap  # a pinned machine, or layers that free machines must hold


def routes_around_pins(tables: CostTables, machines: Collection[int]) -> list[Route]:
    """Build as many routes as possible that give pinned machines their spans."""
    free = set(machines)
    found: list[Route] = []
    while True:
        pinned = [machine for machine in sorted(free) if _span(tables, machine) is not None]
        order = _filled(tables, _chain(tables, pinned), sorted(free - set(pinned))) if pinned else ()
        route = best_split(tables, order).route if order else ()
        if not route:
            return found
        found.append(route)
        free -= {stage.machine for stage in route}


def _span(tables: CostTables, machine: int) -> tuple[int, int] | None:
    return tables.pins.get(tables.problem.machines[machine].name)


def _chain(tables: CostTables, pinned: Iterable[int]) -> list[Step]:
    """Sequence of pinned machines and gaps over all layers, with the fewest layers in gaps."""
    spans = {machine: span for machine in pinned if (span := _span(tables, machine)) is not None}
    least: list[tuple[int, list[Step]]] = [(0, [])]
    for end in range(1, tables.layers + 1):
        cost, steps = least[end - 1]
        before = steps[-1] if steps else None
        gap = (before[0], end) if isinstance(before, tuple) else (end - 1, end)
        ways = [(cost + 1, [*(steps[:-1] if isinstance(before, tuple) else steps), gap])]
        ways += [(least[first][0], [*least[first][1], it]) for it, (first, last) in spans.items() if last + 1 == end]
        least.append(min(ways, key=lambda way: way[0]))
    return least[-1][1]


def _filled(tables: CostTables, chain: list[Step], free: Iterable[int]) -> Order:
    """Fill the gaps with free machines; empty where these are too few, or where the chain has no pinned machine."""
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
