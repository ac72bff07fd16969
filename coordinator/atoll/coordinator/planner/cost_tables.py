"""Precomputed cost tables: the seconds that any machine needs for any span, and for any hop. Used by all solvers.

Shapes: N machines, L layers. Spans are half-open: entry `[a, b]` of an (L + 1) × (L + 1) array is for layers a … b − 1.
A stage has a *total*, the seconds that one micro-batch spends in it forward and backward, and a *period*, the seconds
after which it can take the next one. Both are infinite for a span that the machine may not hold. A hop between two
machines at a cut has the same two figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atoll.coordinator.planner.exchange_time import link_rates
from atoll.coordinator.planner.hop_table import HopTable
from atoll.coordinator.planner.problem import BoolArray, FloatArray, IntArray, Machine, Problem, Reach
from atoll.coordinator.planner.span_tables import SpanTables


@dataclass(frozen=True)
class StageTable:
    """Total and period of one machine for each span."""

    total: FloatArray
    period: FloatArray

    @cached_property
    def most_layers(self) -> int:
        """Length of the longest span that the machine can hold; 0: none."""
        start, end = np.nonzero(np.isfinite(self.period))
        return int((end - start).max(initial=0))

    @cached_property
    def by_length(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """Starts, totals and periods of spans by length (1 to `most_layers`, K values) and end, [K, L + 1]."""
        end = np.arange(self.period.shape[0])
        start = end[None, :] - np.arange(1, self.most_layers + 1)[:, None]
        inside = np.maximum(start, 0)
        total, period = self.total[inside, end], self.period[inside, end]
        return inside, np.where(start < 0, np.inf, total), np.where(start < 0, np.inf, period)


class CostTables:
    """Stage tables of all machines, computed on first use, and the costs of hops between machines."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.layers = len(problem.layers)
        self.spans = SpanTables(problem)
        training = problem.training
        efficiency = training.link_efficiency
        self.uplink = np.array([machine.uplink_bytes_per_second for machine in problem.machines]) * efficiency
        self.downlink = np.array([machine.downlink_bytes_per_second for machine in problem.machines]) * efficiency
        self.hops = HopTable(problem, self.spans.cut_bytes_per_token, self.uplink, self.downlink)
        self.link_bytes_per_second = link_rates(self.uplink, self.downlink)
        self.dialable = np.array([machine.reach is Reach.PUBLIC for machine in problem.machines])
        self.layer_bytes = training.outer_bytes_per_parameter * np.array([layer.parameters for layer in problem.layers])
        self.availability = np.array([machine.availability for machine in problem.machines])
        self.failures_per_second = np.array([machine.failures_per_hour for machine in problem.machines]) / 3600
        self.price_per_second = np.array([machine.price_per_hour for machine in problem.machines]) / 3600
        self.pins = {pin.machine: pin.span for pin in problem.wishes.pins}
        self._stages: dict[int, StageTable] = {}
        self._round_limit_seconds = np.inf

    @property
    def count(self) -> int:
        """Number of machines, N."""
        return len(self.problem.machines)

    def least_step_seconds(self, machines: Iterable[int]) -> float:
        """Shortest inner step, in seconds, that the owners of these machines allow."""
        every = self.problem.machines
        return max((every[machine].minimum_step_seconds for machine in machines), default=0.0)

    def stage(self, machine: int) -> StageTable:
        """Table of `machine`; infinite for spans that memory, trust or a pin forbids."""
        table = self._stages.get(machine)
        if table is None:
            table = self._stages[machine] = self._stage(machine)
        return table

    def with_round_limit(self, seconds: float) -> CostTables:
        """Copy without spans whose parameters keep the machine's link busy longer than this in an outer round."""
        other = copy(self)
        other._stages, other._round_limit_seconds = {}, seconds
        return other

    def seconds_per_token(self, machine: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of forward and of backward, by layer, [L] each."""
        profile, training = self.problem.machines[machine], self.problem.training
        pairs = np.empty((self.layers, 2))
        for index, layer in enumerate(self.problem.layers):
            forward = layer.flops_per_token / profile.flops_per_second if profile.flops_per_second else np.inf
            computed = (forward, forward * training.backward_per_forward)
            pairs[index] = profile.seconds_per_token.get(layer.kind, computed)
        return pairs[:, 0], pairs[:, 1]

    def fits(self, machine: int) -> BoolArray:
        """Mask of the spans that fit the machine's memory, [a, b]."""
        profile, spans = self.problem.machines[machine], self.spans
        if profile.shares_memory:
            found = spans.is_span & (spans.device_bytes + spans.host_bytes <= profile.device_memory_bytes)
        else:
            found = spans.is_span & (spans.device_bytes <= profile.device_memory_bytes)
            found &= spans.host_bytes <= profile.host_memory_bytes
        return found if profile.holds_whole is None else np.where(spans.is_whole, profile.holds_whole, found)

    def compute_seconds(self, machine: int) -> FloatArray:
        """Seconds of one micro-batch, by span, [a, b]: forward, forward again (except in the last stage), backward."""
        forward, backward = (np.concatenate([[0.0], np.cumsum(it)]) for it in self.seconds_per_token(machine))
        once, again = (ends[None, :] - ends[:, None] for ends in (forward + backward, forward))
        return np.asarray(
            self.problem.training.micro_batch_tokens * (once + np.where(self.spans.reruns_forward, again, 0.0))
        )

    def _stage(self, machine: int) -> StageTable:
        spans, training = self.spans, self.problem.training
        tokens, up, down = training.micro_batch_tokens, self.uplink[machine], self.downlink[machine]
        compute = self.compute_seconds(machine)
        tied = spans.borrowed_parameters + spans.lent_parameters
        ties = tied * training.tie_bytes_per_parameter * (1 / up + 1 / down) / 2
        sending, receiving = tokens * spans.sent_bytes_per_token / up, tokens * spans.received_bytes_per_token / down
        allowed = self.fits(machine) & self._permitted(self.problem.machines[machine])
        ends = np.concatenate([[0.0], np.cumsum(self.layer_bytes)])
        allowed &= ends[None, :] - ends[:, None] <= self._round_limit_seconds * self.link_bytes_per_second[machine]
        period = np.maximum(compute, np.maximum(sending, receiving))
        return StageTable(np.where(allowed, compute + ties, np.inf), np.where(allowed, period, np.inf))

    @cached_property
    def _only_span(self) -> dict[str, tuple[int, int] | None]:
        """The only span of each machine that may hold just one; None: it may hold none."""
        return {pin.machine: pin.span for pin in self.problem.wishes.allowed_spans} | self.pins

    def _permitted(self, profile: Machine) -> BoolArray:
        allowed = self.spans.is_span.copy()
        if profile.name in self._only_span:
            span = self._only_span[profile.name]
            allowed[:] = False
            if span is not None:
                allowed[span[0], span[1] + 1] = True
        if self.problem.wishes.trusted_ends and not profile.trusted:
            allowed[0, :] = False
            allowed[:, self.layers] = False
        return allowed
