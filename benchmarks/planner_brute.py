"""The optimum by trying everything, with an evaluation of its own: what the planner's is held against.

Written from `docs/explain/planner.md`, without the planner's tables, cost or solvers; exchange times come from the rule
that today's plans follow (`planner/reduce_shares.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, permutations, product

from atoll.coordinator.planner.problem import Goal, Layout, Machine, Problem, Reach, Stage
from atoll.coordinator.planner.reduce_shares import NodeLink, best_shares, exchange_seconds_per_byte

RELAY = 1_250_000.0


def brute_force(problem: Problem) -> tuple[float, Layout | None]:
    """The highest score, and a layout that has it."""
    usable = {subset: list(_routes(problem, subset)) for subset in _subsets(range(len(problem.machines)))}
    best, layout = 0.0, None
    for division in _divisions(tuple(range(len(problem.machines)))):
        if not _together(problem, {it for subset in division for it in subset}):
            continue
        for routes in product(*(usable[subset] for subset in division)):
            value = score(problem, routes)
            if value > best:
                best, layout = value, Layout(routes)
    return best, layout


def score(problem: Problem, routes: tuple[tuple[Stage, ...], ...]) -> float:
    """The objective of a layout."""
    wishes = problem.wishes
    plain = [_rate(problem, route, penalised=False) for route in routes]
    if not sum(plain):
        return 0.0
    value = sum(_rate(problem, route, penalised=True) for route in routes) * _kept(problem, routes, plain)
    if len(routes) == 1:
        value *= 1 - wishes.sole_holder_discount
    placed = {problem.machines[stage.machine].name for route in routes for stage in route}
    for pin in wishes.pins:
        if pin.span is not None and pin.machine not in placed:
            value *= wishes.unused_pin_discount
    if wishes.goal is Goal.PRICE:
        value /= sum(problem.machines[stage.machine].price_per_hour for route in routes for stage in route) / 3600
    return value


def _together(problem: Problem, members: set[int]) -> bool:
    """Whether these machines reach each other, directly or over any others."""
    reached = {min(members)} if members else set()
    everybody = range(len(problem.machines))
    for _ in everybody:
        reached |= {it for it in everybody if any(_passes(problem, it, other) for other in reached)}
    return members <= reached


def _passes(problem: Problem, one: int, other: int) -> bool:
    return bool(_speed(problem, one, other) and _speed(problem, other, one))


def _subsets(items: range) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(items) + 1):
        yield from combinations(items, size)


def _divisions(items: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All sets of disjoint subsets; whoever is in none is left out."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    yield from _divisions(rest)
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = tuple(it for it in rest if it not in others)
            for more in _divisions(left):
                yield ((first, *others), *more)


def _routes(problem: Problem, machines: tuple[int, ...]) -> Iterator[tuple[Stage, ...]]:
    """Every route of exactly these machines that may be."""
    count = len(problem.layers)
    for order in permutations(machines):
        for cuts in combinations(range(1, count), len(machines) - 1):
            ends = (0, *cuts, count)
            route = tuple(Stage(order[i], ends[i], ends[i + 1] - 1) for i in range(len(order)))
            if all(_permitted(problem, stage) for stage in route) and _rate(problem, route, penalised=False):
                yield route


def _permitted(problem: Problem, stage: Stage) -> bool:
    machine, last = problem.machines[stage.machine], len(problem.layers) - 1
    for pin in problem.wishes.pins:
        if pin.machine == machine.name and pin.span != (stage.first, stage.last):
            return False
    if problem.wishes.trusted_ends and not machine.trusted and (stage.first == 0 or stage.last == last):
        return False
    device, host = _memory(problem, stage)
    if machine.shares_memory:
        return device + host <= machine.device_memory_bytes
    return device <= machine.device_memory_bytes and host <= machine.host_memory_bytes


def _memory(problem: Problem, stage: Stage) -> tuple[float, float]:
    training, layers = problem.training, problem.layers
    span = layers[stage.first : stage.last + 1]
    whole = len(span) == len(layers)
    own = sum(layer.parameters for layer in span)
    device = (own + _tied(problem, stage, lent=False) / 2) * training.device_bytes_per_parameter
    if whole and not training.activation_checkpointing:
        per_token = sum(layer.workspace_bytes_per_token for layer in span)
    else:
        after = len(layers) - stage.first - 1  # stages, at most
        waiting = 1 if whole else min(training.micro_batches, after * (1 + training.ahead) + 1)
        enters = layers[stage.first - 1].activation_bytes_per_token if stage.first else 0
        leaves = 0 if span[-1] is layers[-1] else span[-1].activation_bytes_per_token
        kept = sum(layer.activation_bytes_per_token for layer in span if layer is not layers[-1])
        per_token = waiting * (enters + leaves + 16) + kept + max(layer.workspace_bytes_per_token for layer in span)
    return device + per_token * training.micro_batch_tokens, own * training.host_bytes_per_parameter


def _tied(problem: Problem, stage: Stage, *, lent: bool) -> float:
    """Parameters that the stage borrows from others, or lends to them."""
    inside = range(stage.first, stage.last + 1)
    names = [layer.name for layer in problem.layers]
    pairs = {(names.index(name), place) for place, layer in enumerate(problem.layers) for name in layer.tied_to}
    return sum(
        problem.layers[owner].parameters
        for owner, borrower in pairs
        if (owner in inside and borrower not in inside if lent else borrower in inside and owner not in inside)
    )


def _speed(problem: Problem, source: int, target: int) -> float:
    """Bytes per second of a transfer from one to the other; 0: no route may pass."""
    one, other = problem.machines[source], problem.machines[target]
    there = min(
        one.uplink_bytes_per_second, other.downlink_bytes_per_second, problem.links.bytes_per_second[source, target]
    )
    back = min(
        other.uplink_bytes_per_second, one.downlink_bytes_per_second, problem.links.bytes_per_second[target, source]
    )
    if Reach.PUBLIC not in (one.reach, other.reach):
        if Reach.OUTBOUND in (one.reach, other.reach):
            return 0.0
        there = min(there, RELAY)
    if not there or not back or math.isinf(problem.links.rtt_seconds[source, target]):
        return 0.0
    return float(there) * problem.training.link_efficiency


def _compute(problem: Problem, stage: Stage) -> float:
    """Seconds of a micro-batch."""
    machine, training = problem.machines[stage.machine], problem.training
    ends = stage.last == len(problem.layers) - 1  # the last of a route keeps what backward needs
    recomputes = training.activation_checkpointing if ends and stage.first == 0 else not ends
    seconds = 0.0
    for layer in problem.layers[stage.first : stage.last + 1]:
        forward, backward = machine.seconds_per_token.get(layer.kind) or (
            layer.flops_per_token / machine.flops_per_second,
            training.backward_per_forward * layer.flops_per_token / machine.flops_per_second,
        )
        seconds += forward + backward + (forward if recomputes else 0.0)
    return seconds * training.micro_batch_tokens


def _cut(problem: Problem, layer: int) -> tuple[float, float]:
    """Bytes per token after that layer: activations forth, gradients back."""
    if not 0 <= layer < len(problem.layers) - 1:
        return 0.0, 0.0
    size = problem.layers[layer].activation_bytes_per_token
    return size * problem.training.activation_ratio, size * problem.training.gradient_ratio


def _link_busy(problem: Problem, stage: Stage) -> float:
    """Seconds per token that its own link is busy with activations and gradients."""
    machine, efficiency = problem.machines[stage.machine], problem.training.link_efficiency
    (in_forth, in_back), (out_forth, out_back) = _cut(problem, stage.first - 1), _cut(problem, stage.last)
    sending = (out_forth + in_back) / (machine.uplink_bytes_per_second * efficiency)
    receiving = (in_forth + out_back) / (machine.downlink_bytes_per_second * efficiency)
    return max(sending, receiving)


def _rate(problem: Problem, route: tuple[Stage, ...], *, penalised: bool) -> float:
    training, wishes = problem.training, problem.wishes
    tokens, period = training.micro_batch_tokens, 0.0
    times: list[float] = []
    hops: list[float] = []
    for place, stage in enumerate(route):
        machine, seconds = problem.machines[stage.machine], _compute(problem, stage)
        tied = _tied(problem, stage, lent=False) + _tied(problem, stage, lent=True)
        links = 1 / machine.uplink_bytes_per_second + 1 / machine.downlink_bytes_per_second
        times.append(seconds + tied * training.tie_bytes_per_parameter * links / training.link_efficiency / 2)
        period = max(period, seconds, tokens * _link_busy(problem, stage))
        if place:
            forth, back = (
                _speed(problem, route[place - 1].machine, stage.machine),
                _speed(problem, stage.machine, route[place - 1].machine),
            )
            if not forth or not back:
                return 0.0
            sent, returned = _cut(problem, stage.first - 1)
            rtt = float(problem.links.rtt_seconds[route[place - 1].machine, stage.machine])
            far = wishes.rtt_weight * max(0.0, rtt - wishes.rtt_cap_seconds) if penalised else 0.0
            hops.append(tokens * (sent / forth + returned / back) + rtt + far)
            period = max(period, tokens * sent / forth, tokens * returned / back)
    members: list[Machine] = [problem.machines[stage.machine] for stage in route]
    for first, last in combinations(range(len(route)), 2):
        if (len(route) - 1 - first) * (1 + training.ahead) + 1 < training.micro_batches:
            way = sum(times[first : last + 1]) + sum(hops[first:last])
            period = max(period, way / ((last - first) * (1 + training.ahead) + 1))
    flush = sum(times) + sum(hops) + (training.micro_batches - 1) * period
    flush = max(flush, *(it.minimum_step_seconds for it in members))
    failures = sum(it.failures_per_hour for it in members) / 3600
    present = sum(it.availability for it in members) / len(members)
    return tokens * training.micro_batches / flush * present / (1 + failures * (wishes.recovery_seconds + flush / 2))


def _kept(problem: Problem, routes: tuple[tuple[Stage, ...], ...], rates: list[float]) -> float:
    """Which share of the rate is left when a round must wait for links."""
    if len(routes) < 2:
        return 1.0
    training = problem.training
    interval, longest = training.round_tokens / sum(rates), 0.0
    members = [stage.machine for route in routes for stage in route]
    distance = max(float(problem.links.rtt_seconds[one, other]) for one in members for other in members)
    for route, rate in zip(routes, rates, strict=True):
        for stage in route:
            own = training.round_tokens * rate / sum(rates) * _link_busy(problem, stage)
            exchange = sum(
                _exchange(problem, routes, layer, stage.machine) for layer in range(stage.first, stage.last + 1)
            )
            longest = max(longest, own + exchange + training.protocol_round_trips * distance)
    return interval / max(interval, longest)


def _exchange(problem: Problem, routes: tuple[tuple[Stage, ...], ...], layer: int, machine: int) -> float:
    """Seconds that the exchange of a layer keeps the link of one holder busy."""
    holders = [next(it.machine for it in route if it.first <= layer <= it.last) for route in routes]
    links = {}
    for holder in holders:
        profile = problem.machines[holder]
        rate = min(profile.uplink_bytes_per_second, profile.downlink_bytes_per_second)
        links[str(holder)] = NodeLink(rate * problem.training.link_efficiency, profile.reach is not Reach.PUBLIC)
    size = problem.layers[layer].parameters * problem.training.outer_bytes_per_parameter
    return size * exchange_seconds_per_byte(links, best_shares(links), [str(machine)])
