"""Whether a new layout is worth its moves. Pure.

Machines that get layers fetch anchor and momentum of those they did not hold, and their route trains nothing meanwhile.
Of the layouts that are possible the one that moves least is taken, unless another is better, over the horizon and with
what its moves cost, by more than noise in measurements would be; by much more where somebody loses a place to a machine
that was never seen at work. Where that other one takes nothing from those who have a place and gives them nothing new,
a little is enough: newcomers should not wait for a large gain.
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
from atoll.coordinator.planner.question import NamedRoute
from atoll.coordinator.planner.repair import extend_layout, intact_routes, repair_layout
from atoll.coordinator.planner.solve import solve
from atoll.core.clock import Clock
from atoll.core.units import bytes_text, duration_text

_UNDISTURBED_MIN_GAIN = 0.002  # relative, where nobody who has a place is disturbed
_MAX_SHOWN_GAIN_PERCENT = 1000.0  # per cent: figures beyond say nothing
_LATE_LAYOUT_FACTOR = 1e-3  # of the score of a layout that is not ready within the horizon


@dataclass(frozen=True)
class ReplanResult:
    """What is to be done. `layout` is the old one, as far as it still can be, where `moves` is false."""

    tables: CostTables
    before: Evaluation  # of what can go on as it is
    evaluation: Evaluation
    moves: bool
    reason: str
    fetched_bytes: Mapping[str, float] = field(default_factory=dict)  # by machine, of those that get layers


@dataclass(frozen=True)
class _Option:
    value: Evaluation
    fetched_bytes: Mapping[str, float]
    net_score: float  # less what is not trained while machines fetch
    moved_bytes: float  # of that, by machines that have a place already
    placed: frozenset[str]  # of those
    speed_only_claimed: frozenset[str]  # who would get a place, and whose speed is only told

    def required_gain(self, other: _Option, before: _Option, wishes: Wishes) -> float:
        """By which share it must be better than `other` to be taken instead, where `before` is what stands."""
        if self.placed >= other.placed and self.moved_bytes <= other.moved_bytes:
            return _UNDISTURBED_MIN_GAIN
        ousts = not self.placed >= before.placed and self.speed_only_claimed
        return wishes.unmeasured_speed_hysteresis if ousts else wishes.hysteresis


def replan(
    problem: Problem, current: Sequence[NamedRoute], *, clock: Clock, rng: random.Random, seconds: float,
    steps: int | None = None, standbys: NamedRoute = (),
) -> ReplanResult:  # fmt: skip
    """The layout to go to from `current`, whose machines may be gone or slower by now. Raises what `solve` raises.

    `standbys` hold layers without a place on a route.
    """
    check_problem(problem)
    tables = CostTables(problem)
    check_pins_fit(tables)
    kept = intact_routes(tables, current)
    mended = repair_layout(tables, current)
    start = extend_layout(tables, mended)
    found = solve(problem, clock=clock, rng=rng, seconds=seconds / 2, steps=steps, start=start)
    layouts = [kept, mended, start, found.evaluation.layout]
    if not found.gap:  # the exact solver does not look at what is; a search finds what is as good and nearby
        nearby = solve(problem, clock=clock, rng=rng, seconds=seconds / 2, steps=steps, start=start, exact=False)
        layouts.append(nearby.evaluation.layout)
    return _chosen(tables, current, standbys, kept, layouts)


def assess_layout(
    problem: Problem, current: Sequence[NamedRoute], layout: Sequence[NamedRoute], standbys: NamedRoute = ()
) -> ReplanResult:
    """What going from `current` to `layout` means, whether it pays or not. Raises `PlanInputInvalid`."""
    check_problem(problem)
    tables = CostTables(problem)
    option = _option(tables, current, standbys, intact_routes(tables, layout))
    before = evaluate(tables, intact_routes(tables, current))
    return ReplanResult(tables, before, option.value, bool(option.fetched_bytes), "as ordered", option.fetched_bytes)


def named_routes(problem: Problem, layout: Layout) -> tuple[NamedRoute, ...]:
    """A layout by the names of machines, which outlive a problem's numbers."""
    return tuple(
        tuple((problem.machines[stage.machine].name, stage.first, stage.last) for stage in route)
        for route in layout.routes
    )


def fetched_bytes(
    tables: CostTables, current: Sequence[NamedRoute], layout: Layout, standbys: NamedRoute = ()
) -> dict[str, float]:
    """What each machine of `layout` must fetch of layers that it does not hold, on a route or as a standby."""
    held = {name: range(first, last + 1) for route in (*current, standbys) for name, first, last in route}
    found = {}
    for stage in (stage for route in layout.routes for stage in route):
        name = tables.problem.machines[stage.machine].name
        new = [index for index in range(stage.first, stage.last + 1) if index not in held.get(name, ())]
        parameters = sum(tables.problem.layers[index].parameters for index in new)
        if parameters:
            found[name] = parameters * tables.problem.training.state_bytes_per_parameter
    return found


def _chosen(
    tables: CostTables,
    current: Sequence[NamedRoute],
    standbys: NamedRoute,
    kept: Layout,
    layouts: Sequence[Layout],
) -> ReplanResult:
    options = [_option(tables, current, standbys, layout) for layout in layouts]
    before = best = options[0]
    for option in sorted(options[1:], key=lambda it: it.moved_bytes):
        if option.net_score > best.net_score * (1 + option.required_gain(best, before, tables.problem.wishes)):
            best = option
    total, over = bytes_text(sum(best.fetched_bytes.values())), duration_text(tables.problem.wishes.horizon_seconds)
    if not before.value.score:
        return ReplanResult(tables, before.value, best.value, True, _from_nothing(current, total), best.fetched_bytes)
    if best is not before:
        gain = 100 * (best.net_score / before.net_score - 1)
        better = f"{gain:.1f} %" if gain < _MAX_SHOWN_GAIN_PERCENT else "many times"
        reason = f"{better} better over {over}, after moving {total}"
        return ReplanResult(tables, before.value, best.value, True, reason, best.fetched_bytes)
    most = max(options, key=lambda it: it.net_score)
    gain, total = 100 * (most.net_score / before.net_score - 1), bytes_text(sum(most.fetched_bytes.values()))
    reason = f"moving {total} would bring {gain:.1f} % over {over}: too little"
    return ReplanResult(tables, before.value, before.value, False, reason)


def _from_nothing(current: Sequence[NamedRoute], total: str) -> str:
    return f"no route of the old plan can go on; moving {total}" if current else "the first plan"


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
    """Less the share of the horizon's tokens that routes do not train while their machines fetch."""
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
