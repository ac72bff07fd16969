"""The planner's problem from what nodes told of themselves and measured of one another. Pure.

A profile is its node's own word, so it is compared with what others see: a round trip is the longer of the two that
both ends measured, and speeds are scaled to what the node really trains. Whoever is far off is named.

Layers are timed one by one, when a trainer is loaded; computing many of them in turn, beside the machine's other work,
takes another time. So who trains is corrected by what its span takes, and who does not train yet by as much as others
usually are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.coordinator.planner.capacity import holds_whole, training_of
from atoll.coordinator.planner.links import complete
from atoll.coordinator.planner.problem import Goal, Layer, Links, Machine, Pin, Problem, Reach, Wishes
from atoll.coordinator.planner.question import Measured, Preferences, shares_memory
from atoll.coordinator.planner.shares import MAX_UPLINK, needs_relay
from atoll.core.run_spec import RunSpec

OFF = 3.0  # times: a figure so far from what others see is told to people
_NOISE_SECONDS = 0.01  # that a busy node adds to a round trip now and then
_UNKNOWN_BYTES_PER_SECOND = 1.25e6  # of a link that was not measured yet: a home's uplink
_UNKNOWN_RTT_SECONDS = 0.15  # between two that nobody measured, not even over others: rather far than near
_LEAST_AVAILABILITY = 0.01
_LEAST_SECONDS = 1e-12  # that a layer takes a token: no word of a node's may stop the planner's arithmetic


def wishes_of(preferences: Preferences, pins: tuple[Pin, ...] = ()) -> Wishes:
    """What the operator wants, for solvers."""
    return Wishes(
        goal=Goal(preferences.goal),
        pins=pins,
        hysteresis=preferences.hysteresis,
        unproven_hysteresis=max(Wishes().unproven_hysteresis, preferences.hysteresis),
        horizon_seconds=preferences.horizon_seconds,
        rtt_cap_seconds=preferences.rtt_cap_seconds,
    )


@dataclass(frozen=True)
class Seen:
    """The problem, and what about the nodes' words people should know."""

    problem: Problem
    doubts: Mapping[str, str]  # by name


def problem_of(nodes: Sequence[Measured], layers: tuple[Layer, ...], spec: RunSpec, wishes: Wishes) -> Seen:
    """What to plan for these nodes. Raises nothing: `checks.check_problem` judges the result."""
    doubts: dict[str, str] = {}
    training = training_of(spec)
    told = [_machine(node, layers) for node in nodes]
    found = [_correction(node, machine, layers) for node, machine in zip(nodes, told, strict=True)]
    _compare(nodes, found, doubts)
    usual = statistics.median_low([factor for factor in found if factor] or [1.0])
    machines = tuple(_scaled(machine, factor, usual) for machine, factor in zip(told, found, strict=True))
    rtt, rate = _tables(nodes, doubts)
    return Seen(Problem(machines, _linked(complete(rtt, rate)), layers, training, wishes), doubts)


def _linked(links: Links) -> Links:
    """Members of a run do reach each other: who was not measured yet counts as far."""
    known = np.where(np.isfinite(links.rtt_seconds), links.rtt_seconds, _UNKNOWN_RTT_SECONDS)
    return replace(links, rtt_seconds=known)


def _machine(node: Measured, layers: Sequence[Layer]) -> Machine:
    """By its own word alone."""
    profile, status = node.profile, node.status
    uplink = min(status.uplink_bytes_per_second, MAX_UPLINK) or _UNKNOWN_BYTES_PER_SECOND
    return Machine(
        name=node.name,
        device_memory_bytes=float(profile.device_memory_bytes),
        host_memory_bytes=float(profile.host_memory_bytes),
        uplink_bytes_per_second=uplink,
        # what came in at most is a bound from below; homes receive at least as fast as they send
        downlink_bytes_per_second=max(uplink, min(status.downlink_bytes_per_second, MAX_UPLINK)),
        seconds_per_token={
            time.kind: (
                max(time.forward_seconds_per_token, _LEAST_SECONDS),
                max(time.backward_seconds_per_token, _LEAST_SECONDS),
            )
            for time in profile.layer_times
        },
        flops_per_second=_flops(profile.tokens_per_second, layers),
        reach=Reach.RELAYED if needs_relay(node.multiaddrs) else Reach.PUBLIC,
        shares_memory=shares_memory(profile),
        holds_whole=holds_whole(profile),
        price_per_hour=profile.price_per_hour,
        availability=min(max(node.availability, _LEAST_AVAILABILITY), 1.0),
        failures_per_hour=node.failures_per_hour,
        kind=profile.device_name or profile.device,
    )


def _flops(tokens_per_second: float, layers: Sequence[Layer]) -> float:
    """Of forward and backward, from the probe of whole steps; for kinds of layers without a time of their own."""
    return 3 * tokens_per_second * math.fsum(layer.flops_per_token for layer in layers)


def _correction(node: Measured, machine: Machine, layers: Sequence[Layer]) -> float:
    """How many times what it told its layers take at work; 0: not known."""
    status = node.status
    if node.alone and status.tokens_per_second:
        told, took = _told(machine, layers), 1 / status.tokens_per_second
    else:
        computed = status.computed
        first, last = computed.layers.first, computed.layers.last
        if not (0 < computed.seconds_per_token < math.inf and first <= last < len(layers)):
            return 0.0
        whole = last - first + 1 == len(layers)
        told, took = _told(machine, layers[first : last + 1], again=not whole), computed.seconds_per_token
    return took / told if told else 0.0


def _told(machine: Machine, layers: Sequence[Layer], *, again: bool = False) -> float:
    """Seconds per token by the times of its layers, `again`: with what stages recompute; 0 where one is missing."""
    times = machine.seconds_per_token
    if any(layer.kind not in times for layer in layers):
        return 0.0
    return math.fsum((1 + again) * times[layer.kind][0] + times[layer.kind][1] for layer in layers)


def _compare(nodes: Sequence[Measured], found: Sequence[float], doubts: dict[str, str]) -> None:
    """What they compute with what they said; an owner's limits count in both."""
    for node, factor in zip(nodes, found, strict=True):
        if factor and not 1 / OFF <= factor <= OFF:
            slower, times = ("slower", factor) if factor > 1 else ("faster", 1 / factor)
            doubts[node.name] = f"{node.name} trains {times:.1f} times {slower} than its profile says"


def _scaled(machine: Machine, factor: float, usual: float) -> Machine:
    """With its layers' times as they are at work: corrected by its own factor, or by the usual one."""
    by = factor or usual
    times = {kind: (by * forward, by * backward) for kind, (forward, backward) in machine.seconds_per_token.items()}
    return replace(machine, seconds_per_token=times, proven=factor > 0)


def _tables(nodes: Sequence[Measured], doubts: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Round trips (NaN: not measured) and bytes per second, [source, target]."""
    places = {node.peer_id: place for place, node in enumerate(nodes)}
    rtt = np.full((len(nodes), len(nodes)), np.nan)
    rate = np.full((len(nodes), len(nodes)), np.inf)
    for source, node in enumerate(nodes):
        for peer, path in node.paths.items():
            if peer in places:
                rtt[source, places[peer]] = path.rtt_seconds
                rate[source, places[peer]] = path.bytes_per_second or np.inf
    for name, told in _liars(nodes, rtt).items():
        doubts[name] = f"{doubts[name]}; {told}" if name in doubts else told
    return rtt, rate


def _liars(nodes: Sequence[Measured], rtt: np.ndarray) -> dict[str, str]:
    """Who disagrees with most of those that it measured, and they with it."""
    told = {}
    for place, node in enumerate(nodes):
        ratios = (rtt[place] + _NOISE_SECONDS) / (rtt[:, place] + _NOISE_SECONDS)
        ratios = ratios[np.isfinite(ratios)]
        if len(ratios) < 2:
            continue
        usual = statistics.median(ratios.tolist())
        if not 1 / OFF <= usual <= OFF:
            told[node.name] = f"{node.name} says its round trips are {usual:.2g} times what the other ends measure"
    return told
