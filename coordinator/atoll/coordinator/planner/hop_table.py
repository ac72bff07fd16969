"""Precomputed costs of hops: activations and gradients between two machines at a cut. Used by all solvers.

Shapes: N machines, L layers. A hop between machines that cannot reach each other is not usable: its costs are infinite.
"""

from __future__ import annotations

import numpy as np

from atoll.coordinator.planner.links import transfer_rates
from atoll.coordinator.planner.problem import BoolArray, FloatArray, Problem


class HopTable:
    """Costs of all hops, [N, N]: by source and target."""

    def __init__(self, problem: Problem, cut_bytes: FloatArray, uplink: FloatArray, downlink: FloatArray) -> None:
        training, wishes, rtt = problem.training, problem.wishes, problem.links.rtt_seconds
        rate = transfer_rates(problem)
        tokens = float(training.micro_batch_tokens)
        with np.errstate(divide="ignore"):
            forward = tokens * training.activation_ratio / rate
            backward = tokens * training.gradient_ratio / rate.T
        above_cap = wishes.rtt_weight * np.maximum(0.0, rtt - wishes.rtt_cap_seconds)
        slower_than_access = rate < 0.999 * np.minimum(uplink[:, None], downlink)
        self.usable: BoolArray = rate > 0
        self.total_per_byte: FloatArray = forward + backward  # seconds per byte of `cut_bytes`
        self.period_per_byte: FloatArray = np.maximum(forward, backward)
        self.latency: FloatArray = np.where(self.usable, rtt, np.inf)
        self.penalty: FloatArray = np.where(self.usable, above_cap, np.inf)
        # the hop may have a longer period than both stages
        self.limits_rate: BoolArray = np.asarray(slower_than_access | slower_than_access.T)
        self._cut_bytes = cut_bytes  # per token, by the position of the cut, [L + 1]

    def costs(self, source: int, target: int) -> tuple[FloatArray, FloatArray]:
        """Total (with the penalty for round trips above the cap) and period, by the position of the cut, [L + 1]."""
        cut = self._cut_bytes
        if not self.usable[source, target]:
            return np.full(cut.shape, np.inf), np.full(cut.shape, np.inf)
        constant = self.latency[source, target] + self.penalty[source, target]
        return cut * self.total_per_byte[source, target] + constant, cut * self.period_per_byte[source, target]
