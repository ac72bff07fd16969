"""The outer step, and the digests that prove that everyone took the same one.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1): the averaged pseudo-gradient g goes through SGD
with Nesterov momentum, `m ← μ·m + g`, `θ ← θ − η·(g + μ·m)`.

Replicas must agree bit for bit on any CPU and any number of threads, so only elementwise operations appear,
each rounded on its own: no `add(alpha=)`, no `lerp`, no fused optimiser (they contract to fused multiply-adds
on some machines and not on others: measured).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from atoll.core.run_spec import SyncSection
from atoll.v1 import manifest_pb2

STALE = 3  # progress below this part of the usual is not worth its age


def outer_schedule(sync: SyncSection, committed_tokens: int) -> tuple[float, float]:
    """Outer learning rate and momentum of a round that begins at `committed_tokens`.

    Far from a minimum, pseudo-gradients of successive rounds agree, and full momentum overshoots. So both move in a
    line from plain averaging (1, 0) to the spec's values. Measured in docs/adr/0001.
    """
    warm = min(1.0, committed_tokens / sync.outer_warmup_tokens) if sync.outer_warmup_tokens else 1.0
    return 1.0 + (sync.outer_learning_rate - 1.0) * warm, sync.outer_momentum * warm


def due_tokens(sync: SyncSection, committed_tokens: int, first_tokens: int, fragments: int = 1) -> int:
    """How many tokens since the head make a round due: few at first, `round_tokens` in the long run.

    Replicas that start from random weights and drift for a whole round land in different basins, and their mean is in
    none. `first_tokens` is one inner step of every member. With more than one of the `fragments`, whose rounds take
    turns, that is what makes each due again, and a round is due after a fragment's share; but after a step of all.
    """
    whole = min(sync.round_tokens, first_tokens + int(sync.round_growth * committed_tokens))
    return max(min(first_tokens, whole), whole // fragments)


def is_stale(tokens: int, usual_tokens: int, rounds: int) -> bool:
    """Whether progress is little beside what this node would have trained in the `rounds` committed without it.

    `usual_tokens` is what rounds counted of it before. A node that was frozen brings little, in a direction of long
    ago; one that trained on while it was cut off brings its usual share, whatever its pace, and keeps it. Measured in
    virtual time (8 members, 3 of them frozen for up to 12 rounds, 2 seeds): dropping such progress made the loss 0.3 %
    and 1.1 % lower than rebasing it.
    """
    return STALE * tokens < usual_tokens * rounds


def outer_step(
    anchor_E: Tensor,
    momentum_E: Tensor,
    average_E: Tensor,
    learning_rate: float,
    momentum: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """New anchor and new momentum, both fp32 [E], in `out` if given; the arguments stay as they are."""
    step_E, new_momentum_E = out or (torch.empty_like(anchor_E), torch.empty_like(anchor_E))
    torch.mul(momentum_E, momentum, out=new_momentum_E).add_(average_E)
    torch.mul(new_momentum_E, momentum, out=step_E).add_(average_E).mul_(learning_rate)
    return torch.sub(anchor_E, step_E, out=step_E), new_momentum_E


def layer_states(
    anchor_E: Tensor, momentum_E: Tensor, offsets: Sequence[int], round_number: int
) -> tuple[manifest_pb2.LayerState, ...]:
    """SHA-256 of every layer's slice of both vectors. `offsets` has one entry more than there are layers."""
    return tuple(
        layer_state(layer, anchor_E[start:end], momentum_E[start:end], round_number)
        for layer, (start, end) in enumerate(pairwise(offsets))
    )


def holds(
    layers: Sequence[manifest_pb2.LayerState],
    anchor_E: Tensor,
    momentum_E: Tensor,
    offsets: Sequence[int],
    first: int = 0,
) -> bool:
    """Whether both vectors are, bit for bit, what a manifest says of its `layers`, of which they begin with `first`."""
    spans = list(pairwise(offsets))
    return len(layers) == len(spans) and all(
        item == layer_state(layer, anchor_E[start:end], momentum_E[start:end], item.round)
        for layer, (item, (start, end)) in enumerate(zip(layers, spans, strict=True), first)
    )


def layer_state(layer: int, anchor_E: Tensor, momentum_E: Tensor, round_number: int) -> manifest_pb2.LayerState:
    """SHA-256 of one layer's values in both vectors."""
    return manifest_pb2.LayerState(
        layer=layer, round=round_number, anchor_digest=digest(anchor_E), momentum_digest=digest(momentum_E)
    )


def digest(values_E: Tensor) -> bytes:
    """SHA-256 of the little-endian fp32 bytes."""
    return hashlib.sha256(values_E.contiguous().numpy().data.cast("B")).digest()


def by_tokens(tokens: int) -> int:
    """A contribution weighs what was trained for it."""
    return tokens


def by_roots(tokens: int) -> int:
    """It weighs the square root of that, in 1/1024: the noise of gradients falls with more steps, their drift grows.

    Integers, so that all machines agree; 0 for nothing.
    """
    return math.isqrt(tokens << 20)


PULLS = {"tokens": by_tokens, "roots": by_roots}


def shares_of(weights: Sequence[int], factors: Sequence[float]) -> tuple[float, ...]:
    """wᵢ·fᵢ / Σ wᵢ of each member in a mean; members of weight or factor 0 have 0, and are in neither sum."""
    counts = [weight > 0 and factor > 0 for weight, factor in zip(weights, factors, strict=True)]
    total = float(sum(weight for weight, there in zip(weights, counts, strict=True) if there))
    return tuple(
        float(weight) / total * factor if there else 0.0
        for weight, factor, there in zip(weights, factors, counts, strict=True)
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int], factors: Sequence[float] = ()) -> Tensor:
    """Σ wᵢ·fᵢ·xᵢ / Σ wᵢ in the order given, fp32, on the host; at least one must count."""
    mean = RunningSum(torch.empty_like(values[0]), torch.empty_like(values[0]))
    for value, share in zip(values, shares_of(weights, factors or (1.0,) * len(values)), strict=True):
        if share > 0:
            mean.add(value, share)
    return mean.sum_C


class RunningSum:
    """Σ sᵢ·xᵢ in the order in which they come, each product and each sum rounded to fp32 on its own."""

    def __init__(self, sum_C: Tensor, product_C: Tensor) -> None:
        """In memory of the caller's; what is in it does not count."""
        self.sum_C = sum_C
        self._product_C = product_C
        self._empty = True

    def add(self, value_C: Tensor, share: float) -> None:
        """One more."""
        if self._empty:
            torch.mul(value_C, share, out=self.sum_C)
        else:
            torch.add(self.sum_C, torch.mul(value_C, share, out=self._product_C), out=self.sum_C)
        self._empty = False
