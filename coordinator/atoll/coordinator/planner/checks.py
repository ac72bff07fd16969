"""Validation of a problem before it is solved, and the error for a problem without a solution. Pure.

Profiles come from other people's machines. Every figure is checked here, once; solvers trust a checked problem.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.links import islands
from atoll.coordinator.planner.problem import Goal, Layer, Layout, Machine, Pin, Problem
from atoll.core.errors import NoFeasiblePlan, PlanInputInvalid
from atoll.core.units import bytes_text


def check_problem(problem: Problem) -> None:
    """Raise `PlanInputInvalid` for the first invalid figure; it names the machine, layer, link or pin."""
    if not problem.machines or not problem.layers:
        raise PlanInputInvalid("a plan needs at least one machine and one layer")
    _check_names("machine", [machine.name for machine in problem.machines])
    _check_names("layer", [layer.name for layer in problem.layers])
    kinds = {layer.kind for layer in problem.layers}
    for machine in problem.machines:
        _check_machine(machine, kinds)
    _check_layers(problem)
    _check_training(problem)
    _check_links(problem)
    for pin in problem.wishes.pins:
        _check_pin(problem, pin)
    _check_names("pin", [pin.machine for pin in problem.wishes.pins])
    free = next((machine.name for machine in problem.machines if not machine.price_per_hour), None)
    if problem.wishes.goal is Goal.PRICE and free is not None:
        raise PlanInputInvalid(
            f"{free} has no price_per_hour, and the goal is a low price",
            "set price_per_hour of all machines, or set the goal to time",
        )


def problem_with(machine: Machine, layers: Sequence[Layer]) -> str:
    """Reason why `check_problem` would refuse this machine with these layers; empty if it would not."""
    try:
        _check_machine(machine, {layer.kind for layer in layers})
    except PlanInputInvalid as error:
        return str(error)
    return ""


def check_layout(problem: Problem, layout: Layout) -> None:
    """Raise `PlanInputInvalid` unless every route covers all layers once and no machine is in two routes."""
    _check_names("place of machine", [str(machine) for machine in layout.machines])
    for number, route in enumerate(layout.routes):
        ends = [-1, *(stage.last for stage in route)]
        follows = all(
            stage.first == end + 1 and stage.last >= stage.first for stage, end in zip(route, ends, strict=False)
        )
        if not route or not follows or ends[-1] != len(problem.layers) - 1:
            raise PlanInputInvalid(f"route {number + 1} does not cover the layers once, in order")


def why_infeasible(tables: CostTables) -> NoFeasiblePlan:
    """Build the error for a problem without a layout: it names the missing part and the largest span that fits."""
    problem = tables.problem
    reach = islands(tables.hops.usable)[0]
    unplaceable = _unplaceable_layer(tables, reach)
    if unplaceable:
        return unplaceable
    sizes = {machine: tables.stage(machine).most_layers for machine in reach}
    largest = max(reach, key=lambda machine: sizes[machine])
    held = min(sum(sizes.values()), tables.layers)
    span = _longest_span(tables, largest)
    fits = f"the largest span that fits is layers {span[0]}–{span[1] - 1}, on {problem.machines[largest].name}"
    if held < tables.layers:
        missing = float(tables.spans.device_bytes[held, tables.layers])
        return NoFeasiblePlan(
            f"needs {bytes_text(missing)} more memory: the {len(reach)} machines that reach each other hold "
            f"{held} of {tables.layers} layers; {fits}",
            "add machines, lend more memory, or train a smaller model or micro-batch",
        )
    return NoFeasiblePlan(
        f"no route covers all {tables.layers} layers, although {len(reach)} machines have enough memory in total; "
        f"{fits}",
        "a pin, trusted_ends, a closed link or the split of the memory prevents a route: remove a pin, allow more "
        "trusted machines, open a link, or lend more memory",
    )


def _unplaceable_layer(tables: CostTables, reach: list[int]) -> NoFeasiblePlan | None:
    """Build the error for a layer that none of these machines may or can hold; None if each layer has a holder."""
    for index, layer in enumerate(tables.problem.layers):
        holders = [it for it in reach if np.isfinite(tables.stage(it).period[: index + 1, index + 1 :]).any()]
        if not holders:
            need = float(tables.spans.device_bytes[index, index + 1])
            most = max(tables.problem.machines[it].device_memory_bytes for it in reach)
            return _unplaceable(layer.name, need, most)
    return None


def _unplaceable(layer: str, need: float, most: float) -> NoFeasiblePlan:
    if need > most:
        return NoFeasiblePlan(
            f"needs {bytes_text(need - most)} more memory on one machine: layer {layer} takes "
            f"{bytes_text(need)} and the largest machine lends {bytes_text(most)}",
            "a layer cannot be divided: lend more memory, or use a smaller micro-batch",
        )
    return NoFeasiblePlan(
        f"no machine may hold layer {layer}: each lacks memory of device or host, or trust, or is pinned",
        "remove a pin, trust a machine, or lend more host memory",
    )


def _longest_span(tables: CostTables, machine: int) -> tuple[int, int]:
    start, end = np.nonzero(np.isfinite(tables.stage(machine).period))
    best = int(np.argmax(end - start))
    return int(start[best]), int(end[best])


def _check_names(what: str, names: Iterable[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise PlanInputInvalid(f"{what} {twice!r} is given twice; each {what} may be given once")


def _check_machine(machine: Machine, kinds: set[str]) -> None:
    for name in ("device_memory_bytes", "host_memory_bytes", "uplink_bytes_per_second", "downlink_bytes_per_second"):
        _require(0 < getattr(machine, name) < math.inf, machine, name, "above 0 and finite")
    for name in ("flops_per_second", "minimum_step_seconds", "price_per_hour", "failures_per_hour"):
        _require(0 <= getattr(machine, name) < math.inf, machine, name, "0 or more and finite")
    _require(0 < machine.availability <= 1, machine, "availability", "above 0 and at most 1")
    times = [seconds for pair in machine.seconds_per_token.values() for seconds in pair]
    _require(all(0 <= it < math.inf for it in times), machine, "seconds_per_token", "0 or more and finite")
    unknown = sorted(kinds - machine.seconds_per_token.keys())
    if unknown and not machine.flops_per_second:
        raise PlanInputInvalid(
            f"{machine.name} has neither a time for layers of kind {unknown[0]!r} nor flops_per_second",
            "set flops_per_second, or measure that kind of layer",
        )


def _require(holds: bool, machine: Machine, name: str, bound: str) -> None:
    if not holds:
        raise PlanInputInvalid(f"{name} of {machine.name} is {getattr(machine, name)!r}; it must be {bound}")


def _check_layers(problem: Problem) -> None:
    names = {layer.name for layer in problem.layers}
    for layer in problem.layers:
        for name in (
            "parameters",
            "frozen_parameters",
            "flops_per_token",
            "activation_bytes_per_token",
            "workspace_bytes_per_token",
        ):
            if not 0 <= getattr(layer, name) < math.inf:
                value = getattr(layer, name)
                raise PlanInputInvalid(f"{name} of layer {layer.name} is {value!r}; it must be 0 or more and finite")
        strange = sorted(set(layer.tied_to) - names)
        if strange:
            raise PlanInputInvalid(f"layer {layer.name} is tied to {strange[0]!r}, and there is no such layer")


def _check_training(problem: Problem) -> None:
    training, wishes = problem.training, problem.wishes
    for name in ("micro_batch_tokens", "micro_batches", "round_tokens"):
        if getattr(training, name) < 1:
            raise PlanInputInvalid(f"{name} is {getattr(training, name)!r}; it must be 1 or more")
    if training.ahead < 0:
        raise PlanInputInvalid(f"ahead is {training.ahead!r}; it must be 0 or more")
    for name, value in (vars(training) | vars(wishes)).items():
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise PlanInputInvalid(f"{name} is {value!r}; it must be 0 or more and finite")
    if not 0 < training.link_efficiency <= 1:
        raise PlanInputInvalid(f"link_efficiency is {training.link_efficiency!r}; it must be above 0 and at most 1")


def _check_links(problem: Problem) -> None:
    count, links = len(problem.machines), problem.links
    if links.rtt_seconds.shape != (count, count) or links.bytes_per_second.shape != (count, count):
        raise PlanInputInvalid(f"links must be tables of {count} × {count}")
    for name, table in (("round trip", links.rtt_seconds), ("bandwidth", links.bytes_per_second)):
        wrong = np.argwhere(~(table >= 0))
        if len(wrong):
            one, other = (problem.machines[int(index)].name for index in wrong[0])
            value = float(table[tuple(wrong[0])])
            raise PlanInputInvalid(f"the {name} {one} – {other} is {value}; it must be 0 or more")
    if not np.array_equal(links.rtt_seconds, links.rtt_seconds.T):
        raise PlanInputInvalid("round trips differ by direction; use the longer one (`links.fill_missing_links`)")


def _check_pin(problem: Problem, pin: Pin) -> None:
    machine = next((it for it in problem.machines if it.name == pin.machine), None)
    if machine is None:
        raise PlanInputInvalid(f"a pin names {pin.machine!r}, and there is no such machine")
    if pin.span is None:
        return
    first, last = pin.span
    if not 0 <= first <= last < len(problem.layers):
        raise PlanInputInvalid(
            f"{pin.machine} is pinned to layers {first}–{last}; the model has layers 0–{len(problem.layers) - 1}"
        )
    at_end = first == 0 or last == len(problem.layers) - 1
    if problem.wishes.trusted_ends and at_end and not machine.trusted:
        raise PlanInputInvalid(
            f"{pin.machine} is pinned to an end of the model, and trusted_ends allows only trusted machines there",
            "pin it to other layers, set trusted of that machine, or set trusted_ends = false",
        )


def check_pins_fit(tables: CostTables) -> None:
    """Raise `PlanInputInvalid` for a pinned span that does not fit its machine's memory."""
    for problem in unfit_pins(tables).values():
        raise PlanInputInvalid(problem, "pin it to fewer layers, or lend more memory")


def unfit_pins(tables: CostTables) -> dict[str, str]:
    """Describe the pinned spans that do not fit their machine's memory, by machine."""
    names = {machine.name: index for index, machine in enumerate(tables.problem.machines)}
    found = {}
    for pin in tables.problem.wishes.pins:
        if pin.span is not None and not tables.fits(names[pin.machine])[pin.span[0], pin.span[1] + 1]:
            need = bytes_text(float(tables.spans.device_bytes[pin.span[0], pin.span[1] + 1]))
            layers = f"layers {pin.span[0]}–{pin.span[1]}"
            lent = bytes_text(tables.problem.machines[names[pin.machine]].device_memory_bytes)
            found[pin.machine] = f"{pin.machine} is pinned to {layers}, which take {need}, but it lends {lent}"
    return found


def without_unfit_pins(problem: Problem) -> tuple[Problem, dict[str, str]]:
    """Exclude machines whose pinned span no longer fits; also returns the reasons, by machine."""
    unfit = unfit_pins(CostTables(problem))
    pins = tuple(replace(pin, span=None) if pin.machine in unfit else pin for pin in problem.wishes.pins)
    return replace(problem, wishes=replace(problem.wishes, pins=pins)) if unfit else problem, unfit
