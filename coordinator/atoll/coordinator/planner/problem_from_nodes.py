"""Builds the planner's problem from nodes' profiles and from measurements. Pure.

A node reports its own profile, so the figures are compared with measurements: of the two round trips that both ends
measured the longer one counts, and speeds are scaled to what the node reaches in training. Large differences are
reported to people as doubts.

A trainer times its layers one by one when it is loaded. Many layers one after the other, together with the machine's
other work, take longer. The times of a node that trains are therefore multiplied by its own correction: measured time
over profiled time. A node that never trained gets the median correction of the others, at least 1. So no node loses its
place to a machine whose speed was never measured in training.
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

_PACE_LIMITED_FACTOR = 1.1  # × the owner's minimum step: a step up to this long was limited by it, not by computing
MAX_MISMATCH_FACTOR = 3.0  # a claim that differs from measurements by more than this factor is reported
_NOISE_SECONDS = 0.01  # that a busy node may add to a round trip
_UNKNOWN_BYTES_PER_SECOND = 1.25e6  # assumed for a link that is not measured yet: a home's uplink
_UNKNOWN_RTT_SECONDS = 0.15  # assumed for a pair without any measured path, even through others: a pessimistic value
_LEAST_AVAILABILITY = 0.01
# bounds on reported figures, so that none of them breaks the planner's arithmetic
_LEAST_SECONDS, _MOST_SECONDS = 1e-12, 1e3  # of a layer, per token
_LEAST_BYTES_PER_SECOND = 1.0  # of a link
_MOST_TOKENS_PER_SECOND = 1e12
_MOST_STEP_SECONDS = 3600.0  # of the owner's minimum step
_LEAST_PRICE, _MOST_PRICE = 1e-6, 1e9  # per hour; a lower price counts as none
_MAX_CORRECTION = 1e3  # a correction beyond this factor either way is ignored


def wishes_of(preferences: Preferences, pins: tuple[Pin, ...] = ()) -> Wishes:
    """Translate the operator's preferences into the solvers' form."""
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
    """The problem, and results of checking nodes' profiles."""

    problem: Problem
    doubts: Mapping[str, str]  # by name: how claims differ from measurements
    corrections: Mapping[str, float]  # by name, of nodes that train: measured / profiled time per layer
    refused: Mapping[str, str]  # by name: nodes left out because a reported number is invalid, with its name


def problem_from_nodes(
    nodes: Sequence[PlannerNode], layers: tuple[Layer, ...], spec: RunSpec, wishes: Wishes
) -> NodeProblem:
    """Build the problem of placing these nodes. Raises nothing: `checks.check_problem` validates the result."""
    doubts: dict[str, str] = {}
    training = training_of(spec, layers)
    every = [_machine(node, layers) for node in nodes]
    refused = {machine.name: why for machine in every if (why := problem_with(machine, layers))}
    nodes = [node for node in nodes if node.name not in refused]
    claimed = [machine for machine in every if machine.name not in refused]
    found = [_correction(node, machine, layers) for node, machine in zip(nodes, claimed, strict=True)]
    _note_mismatches(nodes, claimed, found, doubts)
    last_correction = [factor or node.last_correction for node, factor in zip(nodes, found, strict=True)]
    usual = _typical_correction([factor for factor in last_correction if factor])
    machines = [_scaled(machine, factor, usual) for machine, factor in zip(claimed, last_correction, strict=True)]
    corrections = {node.name: factor for node, factor in zip(nodes, found, strict=True) if factor}
    rtt, rate = _tables(nodes, doubts)
    machines, wishes = _priced(machines, wishes)
    names = {machine.name for machine in machines}
    wishes = replace(wishes, pins=tuple(pin for pin in wishes.pins if pin.machine in names))
    problem = Problem(tuple(machines), _with_unknown_links_far(fill_missing_links(rtt, rate)), layers, training, wishes)
    return NodeProblem(problem, doubts, corrections, refused)


def _with_unknown_links_far(links: Links) -> Links:
    """Set unknown round trips to `_UNKNOWN_RTT_SECONDS`, because members of a run do reach each other."""
    known = np.where(np.isfinite(links.rtt_seconds), links.rtt_seconds, _UNKNOWN_RTT_SECONDS)
    return replace(links, rtt_seconds=known)


def _machine(node: PlannerNode, layers: Sequence[Layer]) -> Machine:
    """Build the machine from the node's reports alone."""
    profile, status = node.profile, node.status
    reported = min(status.uplink_bytes_per_second, MAX_UPLINK_BYTES_PER_SECOND)
    uplink = max(reported, _LEAST_BYTES_PER_SECOND) if reported else _UNKNOWN_BYTES_PER_SECOND
    return Machine(
        name=node.name,
        device_memory_bytes=float(profile.device_memory_bytes),
        host_memory_bytes=float(profile.host_memory_bytes),
        uplink_bytes_per_second=uplink,
        # the highest observed rate is a lower bound; home links receive at least as fast as they send
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
    """Shortest inner step that the owner allows; 0 if the reported value is not a positive number."""
    reported = profile.minimum_step_seconds
    return min(reported, _MOST_STEP_SECONDS) if reported > 0 else 0.0


def _flops_per_second(tokens_per_second: float, layers: Sequence[Layer]) -> float:
    """FLOP rate of forward and backward from the probe of whole steps, for layer kinds without their own time."""
    return 3 * min(tokens_per_second, _MOST_TOKENS_PER_SECOND) * math.fsum(layer.flops_per_token for layer in layers)


def _priced(machines: list[Machine], wishes: Wishes) -> tuple[list[Machine], Wishes]:
    """Give machines without a price the highest price if the goal is a low price, so that they are not preferred.

    If no machine has a price, the goal becomes time.
    """
    highest = max((machine.price_per_hour for machine in machines), default=0.0)
    if wishes.goal is not Goal.PRICE:
        return machines, wishes
    if not highest:
        return machines, replace(wishes, goal=Goal.TIME)
    return [replace(it, price_per_hour=it.price_per_hour or highest) for it in machines], wishes


def _correction(node: PlannerNode, machine: Machine, layers: Sequence[Layer]) -> float:
    """Measured time of a node's layers in training over their profiled time; 0: unknown or implausible."""
    status = node.status
    if _is_pace_limited(node, machine):
        return 0.0
    if node.trains_alone and status.tokens_per_second:
        claimed, took = _claimed_seconds_per_token(machine, layers), 1 / max(status.tokens_per_second, _LEAST_SECONDS)
    else:
        computed = status.computed
        first, last = computed.layers.first, computed.layers.last
        if not (0 < computed.seconds_per_token < math.inf and first <= last < len(layers)):
            return 0.0
        reruns = last < len(layers) - 1  # the last stage keeps the activations for backward
        claimed = _claimed_seconds_per_token(machine, layers[first : last + 1], reruns_forward=reruns)
        took = computed.seconds_per_token
    factor = took / claimed if claimed else 0.0
    return factor if 1 / _MAX_CORRECTION <= factor <= _MAX_CORRECTION else 0.0


def _is_pace_limited(node: PlannerNode, machine: Machine) -> bool:
    """True if the owner's minimum step sets the pace, so that steps do not show the node's speed."""
    return node.trains_alone and 0 < node.status.step_seconds <= _PACE_LIMITED_FACTOR * machine.minimum_step_seconds


def _typical_correction(factors: Sequence[float]) -> float:
    """Median correction of the nodes that train (the upper median), limited to 1 … `MAX_MISMATCH_FACTOR`."""
    return min(max(statistics.median_high(factors or [1.0]), 1.0), MAX_MISMATCH_FACTOR)


def _claimed_seconds_per_token(machine: Machine, layers: Sequence[Layer], *, reruns_forward: bool = False) -> float:
    """Sum of the profiled times of these layers; 0 if a time is missing. `reruns_forward`: forward counts twice."""
    times = machine.seconds_per_token
    if any(layer.kind not in times for layer in layers):
        return 0.0
    return math.fsum((1 + reruns_forward) * times[layer.kind][0] + times[layer.kind][1] for layer in layers)


def _note_mismatches(
    nodes: Sequence[PlannerNode], machines: Sequence[Machine], found: Sequence[float], doubts: dict[str, str]
) -> None:
    """Add a doubt for each node whose measured speed differs from its profile by more than `MAX_MISMATCH_FACTOR`."""
    for node, machine, factor in zip(nodes, machines, found, strict=True):
        probed, trained = node.profile.tokens_per_second, node.status.tokens_per_second
        if node.trains_alone and probed and trained and not _is_pace_limited(node, machine):
            factor = probed / trained
        if factor and not 1 / MAX_MISMATCH_FACTOR <= factor <= MAX_MISMATCH_FACTOR:
            slower, times = ("slower", factor) if factor > 1 else ("faster", 1 / factor)
            shown = f"{times:.1f}" if times <= _MAX_CORRECTION else f"more than {_MAX_CORRECTION:.0f}"
            doubts[node.name] = f"{node.name} trains {shown} times {slower} than its profile says"


def _scaled(machine: Machine, factor: float, usual: float) -> Machine:
    """Scale the layer times to training: by the machine's own correction, or by the usual one if it has none (0)."""
    by = factor or usual
    times = {kind: (by * forward, by * backward) for kind, (forward, backward) in machine.seconds_per_token.items()}
    return replace(machine, seconds_per_token=times, speed_measured=factor > 0)


def _tables(nodes: Sequence[PlannerNode], doubts: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Tables of round trips (NaN: not measured) and bytes per second, [source, target]; adds doubts."""
    places = {node.peer_id: place for place, node in enumerate(nodes)}
    rtt = np.full((len(nodes), len(nodes)), np.nan)
    rate = np.full((len(nodes), len(nodes)), np.inf)
    for source, node in enumerate(nodes):
        for peer, path in node.paths.items():
            if peer in places:
                rtt[source, places[peer]] = path.rtt_seconds
                rate[source, places[peer]] = path.bytes_per_second or np.inf
    for name, doubt in _inconsistent_round_trips(nodes, rtt).items():
        doubts[name] = f"{doubts[name]}; {doubt}" if name in doubts else doubt
    return rtt, rate


def _inconsistent_round_trips(nodes: Sequence[PlannerNode], rtt: np.ndarray) -> dict[str, str]:
    """Nodes whose round trips differ from the other ends' measurements: by the median ratio, of two pairs or more."""
    found = {}
    for place, node in enumerate(nodes):
        ratios = (rtt[place] + _NOISE_SECONDS) / (rtt[:, place] + _NOISE_SECONDS)
        ratios = ratios[np.isfinite(ratios)]
        if len(ratios) < 2:
            continue
        usual = statistics.median(ratios.tolist())
        if not 1 / MAX_MISMATCH_FACTOR <= usual <= MAX_MISMATCH_FACTOR:
            found[node.name] = f"{node.name} reports round trips {usual:.2g} times as long as the other ends measure"
    return found
