"""The outer step, and the layer digests that prove that all nodes took the same one.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1): the averaged pseudo-gradient g goes through SGD
with Nesterov momentum, `m ← μ·m + g`, `θ ← θ − η·(g + μ·m)`.

Replicas must agree bit for bit on any CPU and any number of threads. So only elementwise operations appear, each
rounded on its own: no `add(alpha=)`, no `lerp`, no fused optimiser. Measured: on some machines, but not on others,
these compile to fused multiply-adds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from atoll.v1 import manifest_pb2


def outer_step(
    anchor_E: Tensor,
    momentum_E: Tensor,
    average_E: Tensor,
    learning_rate: float,
    momentum: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the new anchor and momentum, fp32 [E], into `out` if given. Changes no other argument."""
    step_E, new_momentum_E = out or (torch.empty_like(anchor_E), torch.empty_like(anchor_E))
    torch.mul(momentum_E, momentum, out=new_momentum_E).add_(average_E)
    torch.mul(new_momentum_E, momentum, out=step_E).add_(average_E).mul_(learning_rate)
    return torch.sub(anchor_E, step_E, out=step_E), new_momentum_E


def layer_states(
    anchor_E: Tensor, momentum_E: Tensor, offsets: Sequence[int], round_number: int
) -> tuple[manifest_pb2.LayerState, ...]:
    """Digests of every layer's slice of both vectors. `offsets` has one entry more than there are layers."""
    return tuple(
        layer_state(layer, anchor_E[start:end], momentum_E[start:end], round_number)
        for layer, (start, end) in enumerate(pairwise(offsets))
    )


def matches_digests(
    layers: Sequence[manifest_pb2.LayerState],
    anchor_E: Tensor,
    momentum_E: Tensor,
    offsets: Sequence[int],
    first: int = 0,
) -> bool:
    """Whether both vectors match the digests of a manifest's `layers`. Their first layer has number `first`."""
    spans = list(pairwise(offsets))
    return len(layers) == len(spans) and all(
        item == layer_state(layer, anchor_E[start:end], momentum_E[start:end], item.round)
        for layer, (item, (start, end)) in enumerate(zip(layers, spans, strict=True), first)
    )


def layer_state(layer: int, anchor_E: Tensor, momentum_E: Tensor, round_number: int) -> manifest_pb2.LayerState:
    """Digests of one layer's values in both vectors."""
    return manifest_pb2.LayerState(
        layer=layer, round=round_number, anchor_digest=digest(anchor_E), momentum_digest=digest(momentum_E)
    )


def digest(values_E: Tensor) -> bytes:
    """SHA-256 of a tensor's little-endian fp32 bytes."""
    return hashlib.sha256(values_E.contiguous().numpy().data.cast("B")).digest()
