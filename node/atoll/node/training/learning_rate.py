"""Learning rate as a pure function of committed tokens, so that nodes may join and leave during a run.

It warms up linearly over `warmup_tokens`. Then it is constant, or decays (linear, cosine) to
`minimum_learning_rate_fraction` of the peak at `stop_tokens`. Every node computes the same number from the same
manifest.
"""

from __future__ import annotations

import math

from atoll.core.run_spec import RunSpec


def learning_rate(spec: RunSpec, committed_tokens: int) -> float:
    """Compute the inner optimiser's learning rate after `committed_tokens` of the whole run."""
    section = spec.optimizer
    if committed_tokens < section.warmup_tokens:
        # add the tokens of one step: the first step must not have rate 0
        return section.learning_rate * min(1.0, (committed_tokens + spec.tokens_per_step) / section.warmup_tokens)
    decay_tokens = max(1, spec.run.stop_tokens - section.warmup_tokens)
    progress = min(1.0, (committed_tokens - section.warmup_tokens) / decay_tokens)
    floor = section.minimum_learning_rate_fraction
    return section.learning_rate * (floor + (1.0 - floor) * _remaining(section.schedule, progress))


def _remaining(schedule: str, progress: float) -> float:
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
