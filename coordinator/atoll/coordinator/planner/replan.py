"""Decides whether a new layout is worth its moves. Pure.

A machine that gets layers fetches anchor and momentum of those it did not hold, and its route does not train meanwhile.
Layouts are compared over the horizon, with the cost of their moves. The layout with the fewest moves is chosen, unless
another one is better by more than a threshold, which covers measurement noise. There are three thresholds:
- a small one, where no placed machine loses its place or gets new layers, so that newcomers need not wait;
- `hysteresis`, where placed machines are disturbed;
- `unmeasured_speed_hysteresis`, where a machine would be replaced by one whose speed was never measured in training.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.coordinator.planner.checks import check_pins_fit, check_problem
from atoll.coordinator.planner.cost import Evaluation, evaluate
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import Layout, Problem, Wishes
from atoll.coordinator.planner.question import STATE_BYTES_PER_PARAMETER, NamedRoute
from atoll.coordinator.planner.repair import extend_layout, intact_routes, repair_layout
from atoll.coordinator.planner.solve import solve
from atoll.core.clock import Clock
from atoll.core.units import bytes_text, duration_text

_UNDISTURBED_MIN_GAIN = 0.002  # relative gain; used if no placed machine is disturbed
_MAX_SHOWN_GAIN_PERCENT = 1000.0  # a larger gain is reported as "many times"
_LATE_LAYOUT_FACTOR = 1e-3  # factor on the score of a layout that is not ready within the horizon


@dataclass(frozen=True)
class ReplanResult:
    """The chosen layout: the feasible part of the old one, if no other layout justifies its moves."""

    tables: CostTables
    before: Evaluation  # of the routes that can continue unchanged
    evaluation: Evaluation
    reason: str
    fetched_bytes: Mapping[str, float] = field(default_factory=dict)  # by machine, of those that get layers


@dataclass(frozen=True)
class _Option:
    value: Evaluation
    fetched_bytes: Mapping[str, float]
    net_score: float  # the score less the training lost while machines fetch
    moved_bytes: float  # fetched by machines that have a place already
    placed: frozenset[str]  # machines that have a place already and keep it
    speed_only_claimed: frozenset[str]  # machines new in the plan whose speed was never measured

    def required_gain(self, other: _Option, before: _Option, wishes: Wishes) -> float:
        """Relative gain over `other` that this option needs to replace it; `before` is the current layout."""
        if self.placed >= other.placed and self.moved_bytes <= other.moved_bytes:
            return _UNDISTURBED_MIN_GAIN
        ousts = not self.placed >= before.placed and self.speed_only_claimed
        return wishes.unmeasured_speed_hysteresis if ousts else wishes.hysteresis


def replan(
    problem: Problem, current: Sequence[NamedRoute], *, clock: Clock, rng: random.Random, seconds: float,
    steps: int | None = None, standbys: NamedRoute = (),
) -> ReplanResult:  # fmt: skip
    """Choose the layout to follow `current`, whose machines may have left or become slower.

    `standbys` hold layers without a place on a route. Raises what `solve` raises.
    """
    check_problem(problem)
    tables = CostTables(problem)
    check_pins_fit(tables)
    kept = intact_routes(tables, current)
    mended = repair_layout(tables, current)
    start = extend_layout(tables, mended)
    found = solve(problem, clock=clock, rng=rng, seconds=seconds / 2, steps=steps, start=start)
    layouts = [kept, mended, start, found.evaluation.layout]
    # the exact solver ignores the current layout; a search from it may find an equally good one with fewer moves
    if not found.gap:
        nearby = solve(problem, clock=clock, rng=rng, seconds=seconds / 2, steps=steps, start=start, exact=False)
        layouts.append(nearby.evaluation.layout)
    return _chosen(tables, current, standbys, layouts)


def assess_layout(
    problem: Problem, current: Sequence[NamedRoute], layout: Sequence[NamedRoute], standbys: NamedRoute = ()
) -> ReplanResult:
    """Evaluate the change from `current` to `layout`, even if its gain is too small. Raises `PlanInputInvalid`."""
    check_problem(problem)
    tables = CostTables(problem)
    option = _option(tables, current, standbys, intact_routes(tables, layout))
    before = evaluate(tables, intact_routes(tables, current))
    reason = "ordered by the operator"
    return ReplanResult(tables, before, option.value, reason, option.fetched_bytes)


def named_routes(problem: Problem, layout: Layout) -> tuple[NamedRoute, ...]:
    """Translate a layout to machine names, which stay valid when the problem's indices change."""
    return tuple(
        tuple((problem.machines[stage.machine].name, stage.first, stage.last) for stage in route)
        for route in layout.routes
    )


def fetched_bytes(
    tables: CostTables, current: Sequence[NamedRoute], layout: Layout, standbys: NamedRoute = ()
) -> dict[str, float]:
    """Bytes that each machine of `layout` must fetch: layers that it holds neither on a route nor as a standby."""
    held = {name: range(first, last + 1) for route in (*current, standbys) for name, first, last in route}
    found = {}
    for stage in (stage for route in layout.routes for stage in route):
        name = tables.problem.machines[stage.machine].name
        new = [index for index in range(stage.first, stage.last + 1) if index not in held.get(name, ())]
        parameters = sum(tables.problem.layers[index].parameters for index in new)
        if parameters:
            found[name] = parameters * STATE_BYTES_PER_PARAMETER
    return found


def _chosen(
    tables: CostTables, current: Sequence[NamedRoute], standbys: NamedRoute, layouts: Sequence[Layout]
) -> ReplanResult:
    options = [_option(tables, current, standbys, layout) for layout in layouts]
    before = best = options[0]
    for option in sorted(options[1:], key=lambda it: it.moved_bytes):
        if option.net_score > best.net_score * (1 + option.required_gain(best, before, tables.problem.wishes)):
            best = option
    total, over = bytes_text(sum(best.fetched_bytes.values())), duration_text(tables.problem.wishes.horizon_seconds)
    if not before.value.score:
        return ReplanResult(tables, before.value, best.value, _from_nothing(current, total), best.fetched_bytes)
    if best is not before:
        gain = 100 * (best.net_score / before.net_score - 1)
        better = f"{gain:.1f} %" if gain < _MAX_SHOWN_GAIN_PERCENT else "many times"
        reason = f"{better} better over {over}, after moving {total}"
        return ReplanResult(tables, before.value, best.value, reason, best.fetched_bytes)
    most = max(options, key=lambda it: it.net_score)
    gain, total = 100 * (most.net_score / before.net_score - 1), bytes_text(sum(most.fetched_bytes.values()))
    reason = f"moving {total} would gain {gain:.1f} % over {over}: too little"
    return ReplanResult(tables, before.value, before.value, reason)


def _from_nothing(current: Sequence[NamedRoute], total: str) -> str:
    return f"no route of the old plan can continue; moving {total}" if current else "the first plan"


def _option(tables: CostTables, current: Sequence[NamedRoute], standbys: NamedRoute, layout: Layout) -> _Option:
    value, fetched = evaluate(tables, layout), fetched_bytes(tables, current, layout, standbys)
    held = {name for route in current for name, _, _ in route}
    machines = [tables.problem.machines[machine] for machine in layout.machines]
    return _Option(
        value=value,
        fetched_bytes=fetched,
        net_score=_net_score(tables, value, fetched),
        moved_bytes=sum(size for name, size in fetched.items() if name in held),
        placed=frozenset(held & {machine.name for machine in machines}),
        speed_only_claimed=frozenset(
            machine.name for machine in machines if not machine.speed_measured and machine.name not in held
        ),
    )


def _net_score(tables: CostTables, value: Evaluation, fetched: Mapping[str, float]) -> float:
    """Score less the share of the horizon's tokens that routes do not train while their machines fetch."""
    problem, lost, kept = tables.problem, 0.0, 1.0
    horizon = problem.wishes.horizon_seconds
    for route, cost in zip(value.layout.routes, value.routes, strict=True):
        waits = [
            fetched.get(problem.machines[stage.machine].name, 0.0) / float(tables.downlink[stage.machine])
            for stage in route
        ]
        kept = _LATE_LAYOUT_FACTOR if max(waits) >= horizon else kept
        lost += cost.tokens_per_second * min(max(waits), horizon)
    total = math.fsum(cost.tokens_per_second for cost in value.routes) * horizon
    return kept * value.score * (1 - lost / total if total else 0.0)
