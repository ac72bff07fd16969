"""The planner's problem from what nodes told of themselves and measured of one another. Pure.

A profile is its node's own word, so it is compared with what others see: a round trip is the longer of the two that
both ends measured, and speeds are scaled to what the node really trains. Whoever is far off is named.

Layers are timed one by one, when a trainer is loaded; computing many of them in turn, beside the machine's other work,
takes another time. So who trains is corrected by what its span takes it, by its own clock, and who never did by as much
as others usually are, rather more: nobody should lose a place to a figure that was not seen at work.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.coordinator.planner.checks import problem_with
from atoll.coordinator.planner.links import fill_missing_links
from atoll.coordinator.planner.problem import Goal, Layer, Links, Machine, Pin, Problem, Reach, Wishes
from atoll.coordinator.planner.question import PlannerNode, Preferences, shares_memory
from atoll.coordinator.planner.reduce_shares import MAX_UPLINK_BYTES_PER_SECOND, needs_relay
from atoll.coordinator.planner.span_memory import holds_whole, training_of
from atoll.core.run_spec import RunSpec
from atoll.v1 import membership_pb2 as mb

_PACE_LIMITED_FACTOR = 1.1  # times its owner's least step: one that is hardly longer was waited out
MAX_MISMATCH_FACTOR = 3.0  # times: a figure so far from what others see is told to people
_NOISE_SECONDS = 0.01  # that a busy node adds to a round trip now and then
_UNKNOWN_BYTES_PER_SECOND = 1.25e6  # of a link that was not measured yet: a home's uplink
_UNKNOWN_RTT_SECONDS = 0.15  # between two that nobody measured, not even over others: rather far than near
_LEAST_AVAILABILITY = 0.01
# no word of a node's may stop the planner's arithmetic
_LEAST_SECONDS, _MOST_SECONDS = 1e-12, 1e3  # that a layer takes a token
_LEAST_BYTES_PER_SECOND = 1.0  # of a link
_MOST_TOKENS_PER_SECOND = 1e12
_MOST_STEP_SECONDS = 3600.0  # that an owner may set
_LEAST_PRICE, _MOST_PRICE = 1e-6, 1e9  # an hour; less is nothing
_MAX_CORRECTION = 1e3  # that a layer's time may be off: beyond, neither figure is believed


def wishes_of(preferences: Preferences, pins: tuple[Pin, ...] = ()) -> Wishes:
    """What the operator wants, for solvers."""
    return Wishes(
        goal=Goal(preferences.goal),
        pins=pins,
        hysteresis=preferences.hysteresis,
        unmeasured_speed_hysteresis=max(Wishes().unmeasured_speed_hysteresis, preferences.hysteresis),
        horizon_seconds=preferences.horizon_seconds,
        rtt_cap_seconds=preferences.rtt_cap_seconds,
    )


@dataclass(frozen=True)
class NodeProblem:
    """The problem, and what about the nodes' words people should know."""

    problem: Problem
    doubts: Mapping[str, str]  # by name
    corrections: Mapping[str, float]  # by name: how many times what they told their layers take those who train
    refused: Mapping[str, str]  # by name: who has no part in the problem, because its word makes no sense


def problem_from_nodes(
    nodes: Sequence[PlannerNode], layers: tuple[Layer, ...], spec: RunSpec, wishes: Wishes
) -> NodeProblem:
    """What to plan for these nodes. Raises nothing: `checks.check_problem` judges the result."""
    doubts: dict[str, str] = {}
    training = training_of(spec)
    every = [_machine(node, layers) for node in nodes]
    refused = {machine.name: why for machine in every if (why := problem_with(machine, layers))}
    nodes = [node for node in nodes if node.name not in refused]
    told = [machine for machine in every if machine.name not in refused]
    found = [_correction(node, machine, layers) for node, machine in zip(nodes, told, strict=True)]
    _note_mismatches(nodes, told, found, doubts)
    last_correction = [factor or node.last_correction for node, factor in zip(nodes, found, strict=True)]
    usual = _typical_correction([factor for factor in last_correction if factor])
    machines = [_scaled(machine, factor, usual) for machine, factor in zip(told, last_correction, strict=True)]
    corrections = {node.name: factor for node, factor in zip(nodes, found, strict=True) if factor}
    rtt, rate = _tables(nodes, doubts)
    machines, wishes = _priced(machines, wishes)
    names = {machine.name for machine in machines}
    wishes = replace(wishes, pins=tuple(pin for pin in wishes.pins if pin.machine in names))
    problem = Problem(tuple(machines), _with_unknown_links_far(fill_missing_links(rtt, rate)), layers, training, wishes)
    return NodeProblem(problem, doubts, corrections, refused)


def _with_unknown_links_far(links: Links) -> Links:
    """Members of a run do reach each other: who was not measured yet counts as far."""
    known = np.where(np.isfinite(links.rtt_seconds), links.rtt_seconds, _UNKNOWN_RTT_SECONDS)
    return replace(links, rtt_seconds=known)


def _machine(node: PlannerNode, layers: Sequence[Layer]) -> Machine:
    """By its own word alone."""
    profile, status = node.profile, node.status
    told = min(status.uplink_bytes_per_second, MAX_UPLINK_BYTES_PER_SECOND)
    uplink = max(told, _LEAST_BYTES_PER_SECOND) if told else _UNKNOWN_BYTES_PER_SECOND
    return Machine(
        name=node.name,
        device_memory_bytes=float(profile.device_memory_bytes),
        host_memory_bytes=float(profile.host_memory_bytes),
        uplink_bytes_per_second=uplink,
        # what came in at most is a bound from below; homes receive at least as fast as they send
        downlink_bytes_per_second=max(uplink, min(status.downlink_bytes_per_second, MAX_UPLINK_BYTES_PER_SECOND)),
        seconds_per_token={
            time.kind: (
                min(max(time.forward_seconds_per_token, _LEAST_SECONDS), _MOST_SECONDS),
                min(max(time.backward_seconds_per_token, _LEAST_SECONDS), _MOST_SECONDS),
            )
            for time in profile.layer_times
        },
        flops_per_second=_flops_per_second(profile.tokens_per_second, layers),
        reach=Reach.RELAYED if needs_relay(node.multiaddrs) else Reach.PUBLIC,
        shares_memory=shares_memory(profile),
        holds_whole=holds_whole(profile),
        minimum_step_seconds=_minimum_step_seconds(profile),
        price_per_hour=min(profile.price_per_hour, _MOST_PRICE) if profile.price_per_hour >= _LEAST_PRICE else 0.0,
        availability=min(max(node.availability, _LEAST_AVAILABILITY), 1.0),
        failures_per_hour=node.failures_per_hour,
        kind=profile.device_name or profile.device,
    )


def _minimum_step_seconds(profile: mb.NodeProfile) -> float:
    """Below which its owner lets no step be; 0 where that is no number."""
    told = profile.minimum_step_seconds
    return min(told, _MOST_STEP_SECONDS) if told > 0 else 0.0


def _flops_per_second(tokens_per_second: float, layers: Sequence[Layer]) -> float:
    """Of forward and backward, from the probe of whole steps; for kinds of layers without a time of their own."""
    return 3 * min(tokens_per_second, _MOST_TOKENS_PER_SECOND) * math.fsum(layer.flops_per_token for layer in layers)


def _priced(machines: list[Machine], wishes: Wishes) -> tuple[list[Machine], Wishes]:
    """Where plans are to be cheap, who asks for nothing counts as the dearest, so that a missing word is no bargain.

    Where nobody has a price there is none to make small.
    """
    dearest = max((machine.price_per_hour for machine in machines), default=0.0)
    if wishes.goal is not Goal.PRICE:
        return machines, wishes
    if not dearest:
        return machines, replace(wishes, goal=Goal.TIME)
    return [replace(it, price_per_hour=it.price_per_hour or dearest) for it in machines], wishes


def _correction(node: PlannerNode, machine: Machine, layers: Sequence[Layer]) -> float:
    """How many times what it told its layers take at work; 0: not known, or not to be believed."""
    status = node.status
    if _waits_for_its_pace(node, machine):
        return 0.0
    if node.alone and status.tokens_per_second:
        told, took = _claimed_seconds_per_token(machine, layers), 1 / max(status.tokens_per_second, _LEAST_SECONDS)
    else:
        computed = status.computed
        first, last = computed.layers.first, computed.layers.last
        if not (0 < computed.seconds_per_token < math.inf and first <= last < len(layers)):
            return 0.0
        again = last < len(layers) - 1  # the last stage keeps what backward needs
        told, took = (
            _claimed_seconds_per_token(machine, layers[first : last + 1], again=again),
            computed.seconds_per_token,
        )
    factor = took / told if told else 0.0
    return factor if 1 / _MAX_CORRECTION <= factor <= _MAX_CORRECTION else 0.0


def _waits_for_its_pace(node: PlannerNode, machine: Machine) -> bool:
    """Then its steps say nothing of its speed."""
    return node.alone and 0 < node.status.step_seconds <= _PACE_LIMITED_FACTOR * machine.minimum_step_seconds


def _typical_correction(factors: Sequence[float]) -> float:
    """By how much those who are at work are off: the middle one, the higher of two."""
    return min(max(statistics.median_high(factors or [1.0]), 1.0), MAX_MISMATCH_FACTOR)


def _claimed_seconds_per_token(machine: Machine, layers: Sequence[Layer], *, again: bool = False) -> float:
    """Seconds per token by the times of its layers, `again`: forward twice; 0 where one is missing."""
    times = machine.seconds_per_token
    if any(layer.kind not in times for layer in layers):
        return 0.0
    return math.fsum((1 + again) * times[layer.kind][0] + times[layer.kind][1] for layer in layers)


def _note_mismatches(
    nodes: Sequence[PlannerNode], machines: Sequence[Machine], found: Sequence[float], doubts: dict[str, str]
) -> None:
    """What they compute with what they said."""
    for node, machine, factor in zip(nodes, machines, found, strict=True):
        probed, trained = node.profile.tokens_per_second, node.status.tokens_per_second
        if node.alone and probed and trained and not _waits_for_its_pace(node, machine):
            factor = probed / trained
        if factor and not 1 / MAX_MISMATCH_FACTOR <= factor <= MAX_MISMATCH_FACTOR:
            slower, times = ("slower", factor) if factor > 1 else ("faster", 1 / factor)
            told = f"{times:.1f}" if times <= _MAX_CORRECTION else f"more than {_MAX_CORRECTION:.0f}"
            doubts[node.name] = f"{node.name} trains {told} times {slower} than its profile says"


def _scaled(machine: Machine, factor: float, usual: float) -> Machine:
    """With its layers' times as they are at work: corrected by its own factor, or by the usual one."""
    by = factor or usual
    times = {kind: (by * forward, by * backward) for kind, (forward, backward) in machine.seconds_per_token.items()}
    return replace(machine, seconds_per_token=times, speed_measured=factor > 0)


def _tables(nodes: Sequence[PlannerNode], doubts: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Round trips (NaN: not measured) and bytes per second, [source, target]."""
    places = {node.peer_id: place for place, node in enumerate(nodes)}
    rtt = np.full((len(nodes), len(nodes)), np.nan)
    rate = np.full((len(nodes), len(nodes)), np.inf)
    for source, node in enumerate(nodes):
        for peer, path in node.paths.items():
            if peer in places:
                rtt[source, places[peer]] = path.rtt_seconds
                rate[source, places[peer]] = path.bytes_per_second or np.inf
    for name, told in _inconsistent_round_trips(nodes, rtt).items():
        doubts[name] = f"{doubts[name]}; {told}" if name in doubts else told
    return rtt, rate


def _inconsistent_round_trips(nodes: Sequence[PlannerNode], rtt: np.ndarray) -> dict[str, str]:
    """Who disagrees with most of those that it measured, and they with it."""
    told = {}
    for place, node in enumerate(nodes):
        ratios = (rtt[place] + _NOISE_SECONDS) / (rtt[:, place] + _NOISE_SECONDS)
        ratios = ratios[np.isfinite(ratios)]
        if len(ratios) < 2:
            continue
        usual = statistics.median(ratios.tolist())
        if not 1 / MAX_MISMATCH_FACTOR <= usual <= MAX_MISMATCH_FACTOR:
            told[node.name] = f"{node.name} says its round trips are {usual:.2g} times what the other ends measure"
    return told
