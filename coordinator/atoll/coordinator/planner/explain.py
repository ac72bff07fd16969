"""Explains a layout to people: placements, waiting reasons, the bottleneck, and possible improvements. Pure.

`explain` returns data; `report.py` and `layout_svg.py` present it. The gain of another machine or of a faster link is
found by planning again with it, starting from the current layout.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from atoll.coordinator.planner.cost import Evaluation, evaluate, exchange_seconds, link_seconds, route_cost
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.links import fill_missing_links, islands
from atoll.coordinator.planner.problem import Layout, Machine, Problem, Reach, Route, Stage
from atoll.coordinator.planner.regions import regions
from atoll.coordinator.planner.solve import Solution, solve
from atoll.coordinator.planner.splits import best_split
from atoll.core.clock import Clock

DAY_SECONDS = 86400.0
_SAME_PLACE_SECONDS = 0.001  # round trip assumed between a new machine and its neighbour
_RELATIVE_TOLERANCE = 1e-6
_MOST_LEFT_OUT = 200  # machines whose reason is computed: each needs some evaluations


@dataclass(frozen=True)
class StagePlacement:
    """One machine's place in a layout."""

    machine: str
    region: int
    route: int
    first: int
    last: int
    memory_bytes: float
    memory_lent_bytes: float
    computing: float  # share of the time
    waits_for: str
    sets_pace: bool  # whether it is the bottleneck of its route
    bytes_per_day: float  # upper bound of the bytes that it sends


@dataclass(frozen=True)
class LeftOut:
    """One machine without a place, with the reason."""

    machine: str
    region: int
    reason: str


@dataclass(frozen=True)
class Improvement:
    """A possible change: tokens per second with it, relative to the best layout without it."""

    what: str
    times: float


@dataclass(frozen=True)
class CurvePoint:
    """A layout of only some routes: those with the most tokens for their price."""

    machines: int
    tokens_per_second: float
    price_per_hour: float
    price_per_billion_tokens: float


@dataclass(frozen=True)
class Explanation:
    """The whole explanation of a layout; its `Evaluation` has the totals."""

    places: tuple[StagePlacement, ...]
    left_out: tuple[LeftOut, ...]
    bottleneck: str
    assumed: tuple[str, ...]  # unproven conditions of the routes
    help: tuple[Improvement, ...]
    curve: tuple[CurvePoint, ...]
    sweet_spot: int  # number of machines with the least time × price


def explain(found: Solution, *, clock: Clock, rng: random.Random, seconds: float) -> Explanation:
    """Explain a solution; `seconds` is the time for finding improvements."""
    tables, value = found.tables, found.evaluation
    label = regions(found.problem)
    curve = tuple(_curve(tables, value))
    return Explanation(
        places=tuple(_places(tables, value, label.tolist())),
        left_out=left_out(tables, value, _MOST_LEFT_OUT),
        bottleneck=bottleneck(tables, value),
        assumed=tuple(_assumed(tables, value)),
        help=tuple(_improvements(found, clock, rng, seconds)),
        curve=curve,
        sweet_spot=min(curve, key=lambda it: it.price_per_hour / max(it.tokens_per_second, 1e-12) ** 2).machines,
    )


def _assumed(tables: CostTables, value: Evaluation) -> Iterator[str]:
    machines = tables.problem.machines
    for before, after in (pair for route in value.layout.routes for pair in pairwise(route)):
        one, other = machines[before.machine], machines[after.machine]
        if Reach.PUBLIC not in (one.reach, other.reach):
            yield (
                f"{one.name} and {other.name} are both behind NAT and connect by hole punching, at 10 Mbit/s. Some "
                "routers do not allow it: make one of the two reachable"
            )


def bottleneck(tables: CostTables, value: Evaluation) -> str:
    """Name the bottleneck of the whole layout, in one sentence."""
    outer, machines = value.round, tables.problem.machines
    if outer.busiest is not None and outer.seconds > outer.interval_seconds * (1 + _RELATIVE_TOLERANCE):
        return (
            f"outer rounds: the link of {machines[outer.busiest].name} needs {outer.seconds:.0f} s per round, "
            f"but the swarm trains a round's tokens in {outer.interval_seconds:.0f} s"
        )
    slowest = min(
        range(len(value.routes)), key=lambda it: value.routes[it].tokens_per_second / len(value.layout.routes[it])
    )
    name, reason = _pace_setter(tables, value.layout.routes[slowest])
    return f"{name}, in route {slowest + 1}: {reason}"


def _pace_setter(tables: CostTables, route: Route) -> tuple[str, str]:
    """Return the machine, link or path that sets a route's pace, and the reason."""
    cost, training = route_cost(tables, route), tables.problem.training
    names = [machine.name for machine in tables.problem.machines]
    slowest = max((stage.machine for stage in route), key=lambda it: tables.least_step_seconds([it]))
    if cost.flush_seconds <= tables.least_step_seconds([slowest]):
        return names[slowest], f"its owner set a minimum step of {cost.flush_seconds:g} s"
    if cost.in_flight_limit.period_seconds > cost.period_seconds * (1 + _RELATIVE_TOLERANCE):
        ends = " – ".join(
            names[route[place].machine] for place in (cost.in_flight_limit.first, cost.in_flight_limit.last)
        )
        limit = cost.in_flight_limit
        reason = f"{limit.in_flight} micro-batches in flight do not cover {limit.round_trip_seconds:.2f} s"
        return f"the round trip {ends}", reason
    for stage in route:
        if tables.stage(stage.machine).period[stage.first, stage.last + 1] >= cost.period_seconds * (
            1 - _RELATIVE_TOLERANCE
        ):
            link = training.micro_batch_tokens * link_seconds(tables, stage.machine, stage.first, stage.last + 1)
            computes = link < cost.period_seconds * (1 - _RELATIVE_TOLERANCE)
            return names[stage.machine], "its computing sets the pace" if computes else "its link sets the pace"
    before, after = max(pairwise(route), key=lambda it: _hop_period(tables, it))
    return f"{names[before.machine]} – {names[after.machine]}", "the path between them sets the pace"


def _hop_period(tables: CostTables, pair: tuple[Stage, Stage]) -> float:
    return float(tables.hops.costs(pair[0].machine, pair[1].machine)[1][pair[1].first])


def _places(tables: CostTables, value: Evaluation, label: Sequence[int]) -> Iterator[StagePlacement]:
    outer, rounds = exchange_seconds(tables, value.layout), DAY_SECONDS / value.round.seconds
    training, slower = tables.problem.training, value.round.interval_seconds / value.round.seconds
    for number, (route, cost) in enumerate(zip(value.layout.routes, value.routes, strict=True)):
        setter, reason = _pace_setter(tables, route)
        for stage in route:
            machine, a, b = tables.problem.machines[stage.machine], stage.first, stage.last + 1
            seconds = tables.compute_seconds(stage.machine)[a, b] * training.micro_batches
            of_rounds = outer.get(stage.machine, 0.0) * float(tables.link_bytes_per_second[stage.machine]) * rounds
            sent = float(tables.spans.sent_bytes_per_token[a, b]) * cost.tokens_per_second * slower * DAY_SECONDS
            yield StagePlacement(
                machine=machine.name,
                region=label[stage.machine],
                route=number,
                first=a,
                last=stage.last,
                memory_bytes=float(tables.spans.device_bytes[a, b]),
                memory_lent_bytes=machine.device_memory_bytes,
                computing=float(seconds / cost.flush_seconds) * slower,
                waits_for=reason if setter == machine.name else f"{setter}: {reason}",
                sets_pace=setter == machine.name,
                bytes_per_day=of_rounds + sent,
            )


def left_out(tables: CostTables, value: Evaluation, most: int) -> tuple[LeftOut, ...]:
    """Machines without a place in a layout (of at least one route), and why; at most `most` reasons are computed."""
    placed, label = set(value.layout.machines), regions(tables.problem).tolist()
    home = next((set(island) for island in islands(tables.hops.usable) if placed & set(island)), placed)
    outside = [index for index in range(tables.count) if index not in placed]
    reasons = [_reason(tables, value, index, home) for index in outside[:most]]
    reasons += ["the search found no place for this machine"] * (len(outside) - len(reasons))
    return tuple(
        LeftOut(tables.problem.machines[index].name, label[index], reason)
        for index, reason in zip(outside, reasons, strict=True)
    )


def _reason(tables: CostTables, value: Evaluation, index: int, home: set[int]) -> str:
    machine = tables.problem.machines[index]
    if machine.name in tables.pins and tables.pins[machine.name] is None:
        return "pinned out by the operator"
    if index not in home:
        return "cannot connect to the other machines"
    if not tables.stage(index).most_layers:
        least = float(tables.spans.device_bytes[tables.spans.is_span].min())
        return f"cannot hold any layer: the smallest takes {least / 1e9:.1f} GB, or pins or trust forbid those that fit"
    best = max(_layouts_with(tables, value.layout, index), key=lambda it: it.score, default=None)
    if best is None:
        held = tables.stage(index).most_layers
        return f"can hold {held} of {tables.layers} layers, and no free machine can hold the rest"
    worse = 1 - best.score / value.score
    if worse < -_RELATIVE_TOLERANCE:
        return f"the swarm would be {-100 * worse:.1f} % better with it: too little for the layers that would move"
    if worse < _RELATIVE_TOLERANCE:
        return "the swarm would be equally fast with it"
    late = best.round.seconds > best.round.interval_seconds * (1 + _RELATIVE_TOLERANCE) and best.round.busiest == index
    why = (
        f"its link would need {best.round.seconds:.0f} s per round"
        if late
        else "it would slow down even its best route"
    )
    return f"the swarm would be {100 * worse:.1f} % worse with it: {why}"


def _layouts_with(tables: CostTables, layout: Layout, index: int) -> Iterator[Evaluation]:
    """Evaluate layouts with that machine added: alone, or at the start, middle or end of each of a few routes."""
    alone = best_split(tables, (index,))
    if alone.score_rate:
        yield evaluate(tables, Layout((*layout.routes, alone.route)))
    for place, route in enumerate(layout.routes[:8]):
        order = [stage.machine for stage in route]
        for at in {0, len(order) // 2, len(order)}:
            split = best_split(tables, (*order[:at], index, *order[at:]))
            if split.score_rate:
                yield evaluate(tables, Layout((*layout.routes[:place], split.route, *layout.routes[place + 1 :])))


def _improvements(found: Solution, clock: Clock, rng: random.Random, seconds: float) -> Iterator[Improvement]:
    """Gains of one more machine of each kind next to the slowest one, and of a link twice as fast for that one."""
    problem, layout = found.problem, found.evaluation.layout
    beside = found.evaluation.round.busiest
    beside = layout.routes[0][0].machine if beside is None else beside
    kinds = {machine.kind: machine for machine in problem.machines if machine.kind}
    changes = [(f"one more {kind}", _one_more(problem, kinds[kind], beside)) for kind in sorted(kinds)]
    changes.append((f"{problem.machines[beside].name}'s link twice as fast", _twice_the_link(problem, beside)))
    part = seconds / (len(changes) + 1)
    before = solve(problem, clock=clock, rng=rng, seconds=part, start=layout).evaluation.tokens_per_second
    before = max(before, found.evaluation.tokens_per_second)
    for what, changed in changes:
        after = solve(changed, clock=clock, rng=rng, seconds=part, start=layout).evaluation.tokens_per_second
        yield Improvement(what, after / before if before else math.inf)


def _one_more(problem: Problem, model: Machine, beside: int) -> Problem:
    names = {machine.name for machine in problem.machines}
    name = next(f"new-{number}" for number in range(1, len(names) + 2) if f"new-{number}" not in names)
    rtt = np.pad(problem.links.rtt_seconds, (0, 1), mode="edge")
    rtt[-1, :-1] = rtt[:-1, -1] = problem.links.rtt_seconds[beside] + _SAME_PLACE_SECONDS
    rate = np.pad(problem.links.bytes_per_second, (0, 1), constant_values=np.inf)
    more = replace(model, name=name, region=problem.machines[beside].region)
    return replace(problem, machines=(*problem.machines, more), links=fill_missing_links(rtt, rate))


def _twice_the_link(problem: Problem, index: int) -> Problem:
    machine = problem.machines[index]
    faster = replace(
        machine,
        uplink_bytes_per_second=2 * machine.uplink_bytes_per_second,
        downlink_bytes_per_second=2 * machine.downlink_bytes_per_second,
    )
    return replace(problem, machines=(*problem.machines[:index], faster, *problem.machines[index + 1 :]))


def _curve(tables: CostTables, value: Evaluation) -> Iterator[CurvePoint]:
    """Add routes in order of tokens per price, or of tokens per machine if nothing has a price."""
    worth = [
        cost.tokens_per_second / (cost.price_per_second or len(route))
        for cost, route in zip(value.routes, value.layout.routes, strict=True)
    ]
    order = sorted(range(len(worth)), key=lambda it: -worth[it])
    for count in range(1, len(order) + 1):
        layout = Layout(tuple(value.layout.routes[it] for it in order[:count]))
        part = evaluate(tables, layout)
        price = part.price_per_token * 1e9
        yield CurvePoint(
            len(layout.machines),
            part.tokens_per_second,
            part.price_per_second * 3600,
            price if math.isfinite(price) else 0.0,
        )
