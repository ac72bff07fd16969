"""What a problem must be before anyone solves it, and what to say when no plan exists. Pure.

Profiles come from other people's machines: every figure is looked at here, once, and solvers trust what passed.
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
    """Raises `PlanInputInvalid` that names the machine, layer, link or pin, and the figure."""
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
    if problem.wishes.goal is Goal.PRICE and any(not machine.price_per_hour for machine in problem.machines):
        free = next(machine.name for machine in problem.machines if not machine.price_per_hour)
        raise PlanInputInvalid(
            f"{free} has no price, and the plan is to be cheap", "set price_per_hour of all machines"
        )


def problem_with(machine: Machine, layers: Sequence[Layer]) -> str:
    """What keeps one machine out of any problem with these layers; empty: nothing."""
    try:
        _check_machine(machine, {layer.kind for layer in layers})
    except PlanInputInvalid as error:
        return str(error)
    return ""


def check_layout(problem: Problem, layout: Layout) -> None:
    """Raises `PlanInputInvalid` unless every route covers all layers once and no machine stands in two."""
    _check_names("place of machine", [str(machine) for machine in layout.machines])
    for number, route in enumerate(layout.routes):
        ends = [-1, *(stage.last for stage in route)]
        follows = all(
            stage.first == end + 1 and stage.last >= stage.first for stage, end in zip(route, ends, strict=False)
        )
        if not route or not follows or ends[-1] != len(problem.layers) - 1:
            raise PlanInputInvalid(f"route {number + 1} does not cover the layers once, in order")


def why_infeasible(tables: CostTables) -> NoFeasiblePlan:
    """The error for a problem that no layout solves: what is missing, and the largest span that fits."""
    problem = tables.problem
    reach = islands(tables.usable)[0]
    nowhere = _nowhere(tables, reach)
    if nowhere:
        return nowhere
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
        f"no route covers all {tables.layers} layers, though {len(reach)} machines have the memory in sum; {fits}",
        "pins, trusted ends, closed links or spans that do not meet forbid it: loosen one, or lend more memory",
    )


def _nowhere(tables: CostTables, reach: list[int]) -> NoFeasiblePlan | None:
    """A single layer that no machine may or can hold."""
    for index, layer in enumerate(tables.problem.layers):
        holders = [it for it in reach if np.isfinite(tables.stage(it).period[: index + 1, index + 1 :]).any()]
        if holders:
            continue
        need = float(tables.spans.device_bytes[index, index + 1])
        most = max(tables.problem.machines[it].device_memory_bytes for it in reach)
        if need > most:
            return NoFeasiblePlan(
                f"needs {bytes_text(need - most)} more memory on one machine: layer {layer.name} takes "
                f"{bytes_text(need)} and the largest machine lends {bytes_text(most)}",
                "a layer is never divided: lend more memory, or take a smaller micro-batch",
            )
        return NoFeasiblePlan(
            f"no machine may hold layer {layer.name}: memory of device or host, trust and pins forbid it everywhere",
            "loosen a pin, trust a machine, or lend more host memory",
        )
    return None


def _longest_span(tables: CostTables, machine: int) -> tuple[int, int]:
    start, end = np.nonzero(np.isfinite(tables.stage(machine).period))
    best = int(np.argmax(end - start))
    return int(start[best]), int(end[best])


def _check_names(what: str, names: Iterable[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise PlanInputInvalid(f"there are two {what}s {twice!r}")


def _check_machine(machine: Machine, kinds: set[str]) -> None:
    positive = ("device_memory_bytes", "host_memory_bytes", "uplink_bytes_per_second", "downlink_bytes_per_second")
    for name in positive:
        _require(math.isfinite(getattr(machine, name)) and getattr(machine, name) > 0, machine, name)
    for name in ("flops_per_second", "minimum_step_seconds", "price_per_hour", "failures_per_hour"):
        _require(math.isfinite(getattr(machine, name)) and getattr(machine, name) >= 0, machine, name)
    _require(0 < machine.availability <= 1, machine, "availability")
    times = [seconds for pair in machine.seconds_per_token.values() for seconds in pair]
    _require(all(math.isfinite(it) and it >= 0 for it in times), machine, "seconds_per_token")
    unknown = sorted(kinds - machine.seconds_per_token.keys())
    if unknown and not machine.flops_per_second:
        raise PlanInputInvalid(f"nothing says how fast {machine.name} computes a layer of kind {unknown[0]!r}")


def _require(holds: bool, machine: Machine, name: str) -> None:
    if not holds:
        raise PlanInputInvalid(f"{name} of {machine.name} cannot be {getattr(machine, name)!r}")


def _check_layers(problem: Problem) -> None:
    names = {layer.name for layer in problem.layers}
    for layer in problem.layers:
        figures = (
            layer.parameters,
            layer.frozen_parameters,
            layer.flops_per_token,
            layer.activation_bytes_per_token,
            layer.workspace_bytes_per_token,
        )
        if not all(math.isfinite(it) and it >= 0 for it in figures):
            raise PlanInputInvalid(f"layer {layer.name} has a figure that is negative or no number: {figures}")
        strange = sorted(set(layer.tied_to) - names)
        if strange:
            raise PlanInputInvalid(f"layer {layer.name} is tied to {strange[0]!r}, which is no layer")


def _check_training(problem: Problem) -> None:
    training, wishes = problem.training, problem.wishes
    counts = ("micro_batch_tokens", "micro_batches", "round_tokens")
    wrong = next((name for name in counts if getattr(training, name) < 1), None)
    wrong = wrong or ("ahead" if training.ahead < 0 else None)
    for owner in (training, wishes):
        figures = {name: value for name, value in vars(owner).items() if isinstance(value, float)}
        wrong = wrong or next((name for name, value in figures.items() if not 0 <= value < math.inf), None)
    if not 0 < training.link_efficiency <= 1:
        wrong = "link_efficiency"
    if wrong:
        raise PlanInputInvalid(f"{wrong} has a value that it cannot have")


def _check_links(problem: Problem) -> None:
    count, links = len(problem.machines), problem.links
    if links.rtt_seconds.shape != (count, count) or links.bytes_per_second.shape != (count, count):
        raise PlanInputInvalid(f"links must be tables of {count} × {count}")
    for name, table in (("round trip", links.rtt_seconds), ("bandwidth", links.bytes_per_second)):
        wrong = np.argwhere(~(table >= 0))
        if len(wrong):
            one, other = (problem.machines[int(index)].name for index in wrong[0])
            raise PlanInputInvalid(f"the {name} {one} – {other} is negative or no number")
    if not np.array_equal(links.rtt_seconds, links.rtt_seconds.T):
        raise PlanInputInvalid("round trips differ by direction; take the longer (`links.complete`)")


def _check_pin(problem: Problem, pin: Pin) -> None:
    machine = next((it for it in problem.machines if it.name == pin.machine), None)
    if machine is None:
        raise PlanInputInvalid(f"a pin names {pin.machine!r}, which is no machine")
    if pin.span is None:
        return
    first, last = pin.span
    if not 0 <= first <= last < len(problem.layers):
        raise PlanInputInvalid(f"{pin.machine} is pinned to layers {first}–{last} of {len(problem.layers)}")
    at_end = first == 0 or last == len(problem.layers) - 1
    if problem.wishes.trusted_ends and at_end and not machine.trusted:
        raise PlanInputInvalid(f"{pin.machine} is pinned to an end of the model and is not trusted with one")


def check_pins_fit(tables: CostTables) -> None:
    """Raises `PlanInputInvalid` for a pinned span that does not fit its machine's memory."""
    for told in unfit_pins(tables).values():
        raise PlanInputInvalid(told, "pin it to fewer layers, or lend more memory")


def unfit_pins(tables: CostTables) -> dict[str, str]:
    """By machine: pinned spans that do not fit its memory, in words."""
    names = {machine.name: index for index, machine in enumerate(tables.problem.machines)}
    found = {}
    for pin in tables.problem.wishes.pins:
        if pin.span is not None and not tables.fits(names[pin.machine])[pin.span[0], pin.span[1] + 1]:
            need = bytes_text(float(tables.spans.device_bytes[pin.span[0], pin.span[1] + 1]))
            layers = f"layers {pin.span[0]}–{pin.span[1]}"
            lent = bytes_text(tables.problem.machines[names[pin.machine]].device_memory_bytes)
            found[pin.machine] = f"{pin.machine} is pinned to {layers}, which take {need} there, and lends {lent}"
    return found


def without_unfit_pins(problem: Problem) -> tuple[Problem, dict[str, str]]:
    """With no part for machines whose pinned span does not fit any more, and why, by machine."""
    unfit = unfit_pins(CostTables(problem))
    pins = tuple(replace(pin, span=None) if pin.machine in unfit else pin for pin in problem.wishes.pins)
    return replace(problem, wishes=replace(problem.wishes, pins=pins)) if unfit else problem, unfit
