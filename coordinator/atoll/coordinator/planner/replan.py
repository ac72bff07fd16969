"""Whether a new layout is worth its moves. Pure.

Machines that get layers fetch anchor and momentum of those they did not hold, and their route trains nothing meanwhile.
A change is made when what it brings over the horizon pays for that, and for more than noise in measurements would.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.coordinator.planner.cost import Evaluation, evaluate
from atoll.coordinator.planner.problem import Layout, Problem, Stage
from atoll.coordinator.planner.solve import solve
from atoll.coordinator.planner.tables import Tables
from atoll.core.clock import Clock
from atoll.core.units import bytes_text, duration_text

NamedRoute = tuple[tuple[str, int, int], ...]  # machine, first and last layer


@dataclass(frozen=True)
class Change:
    """What is to be done. `layout` is the old one, as far as it still can be, where `moves` is false."""

    evaluation: Evaluation
    moves: bool
    reason: str
    fetched_bytes: Mapping[str, float]  # by machine, of those that get layers


def replan(
    problem: Problem, current: Sequence[NamedRoute], *, clock: Clock, rng: random.Random, seconds: float,
    steps: int | None = None,
) -> Change:  # fmt: skip
    """The layout to go to from `current`, whose machines may be gone or slower by now. Raises what `solve` raises."""
    kept = still_possible(problem, current)
    found = solve(problem, clock=clock, rng=rng, seconds=seconds / 2, steps=steps, start=kept)
    tables, before = found.tables, evaluate(found.tables, kept)
    layouts = [found.evaluation]
    if (
        not found.gap
    ):  # the exact solver does not look at what is; of layouts that are as good, a search finds one nearby
        nearby = solve(problem, clock=clock, rng=rng, seconds=seconds / 2, steps=steps, start=kept, exact=False)
        layouts.append(nearby.evaluation)
    options = [(it, fetched_bytes(tables, current, it.layout)) for it in layouts]
    if not before.score:
        return Change(found.evaluation, True, "no route of the old plan can go on", options[0][1])
    gain, (after, fetched) = max(
        ((worth_of_moving(tables, before, *option), option) for option in options), key=lambda it: it[0]
    )
    hysteresis = problem.wishes.hysteresis
    total = bytes_text(sum(fetched.values()))
    over = duration_text(problem.wishes.horizon_seconds)
    if gain > hysteresis:
        return Change(after, True, f"{100 * gain:.1f} % better over {over}, after moving {total}", fetched)
    return Change(before, False, f"moving {total} would bring {100 * gain:.1f} % over {over}: too little", {})


def named_routes(problem: Problem, layout: Layout) -> tuple[NamedRoute, ...]:
    """A layout by the names of machines, which outlive a problem's numbers."""
    return tuple(
        tuple((problem.machines[stage.machine].name, stage.first, stage.last) for stage in route)
        for route in layout.routes
    )


def still_possible(problem: Problem, current: Sequence[NamedRoute]) -> Layout:
    """The routes all of whose machines are there."""
    places = {machine.name: index for index, machine in enumerate(problem.machines)}
    whole = [route for route in current if all(name in places for name, _, _ in route)]
    return Layout(tuple(tuple(Stage(places[name], first, last) for name, first, last in route) for route in whole))


def fetched_bytes(tables: Tables, current: Sequence[NamedRoute], layout: Layout) -> dict[str, float]:
    """What each machine of `layout` must fetch of layers that it does not hold."""
    held = {name: range(first, last + 1) for route in current for name, first, last in route}
    found = {}
    for stage in (stage for route in layout.routes for stage in route):
        name = tables.problem.machines[stage.machine].name
        new = [index for index in range(stage.first, stage.last + 1) if index not in held.get(name, ())]
        parameters = sum(tables.problem.layers[index].parameters for index in new)
        if parameters:
            found[name] = parameters * tables.problem.training.state_bytes_per_parameter
    return found


def worth_of_moving(tables: Tables, before: Evaluation, after: Evaluation, fetched: Mapping[str, float]) -> float:
    """By which share `after` is better over the horizon, with what is not trained while machines fetch."""
    problem = tables.problem
    lost = 0.0  # tokens
    for route, cost in zip(after.layout.routes, after.routes, strict=True):
        waits = [
            fetched.get(problem.machines[stage.machine].name, 0.0) / float(tables.downlink[stage.machine])
            for stage in route
        ]
        lost += cost.tokens_per_second * min(max(waits), problem.wishes.horizon_seconds)
    share = lost / (after.tokens_per_second * problem.wishes.horizon_seconds) if after.tokens_per_second else 1.0
    return after.score * (1 - share) / before.score - 1
