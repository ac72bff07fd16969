"""Targets of next-token prediction: which tokens a loss counts, and the mean over those of a whole batch.

A token that is an input but no target is stored as its bitwise complement, which is negative. Shape suffixes: B batch,
T sequence, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

IGNORED = -100  # target of a place that the loss does not count


def inputs_and_targets(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Split windows [B, T+1] into inputs and targets [B,T]; targets are `IGNORED` where the loss does not count."""
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    return torch.where(inputs_BT < 0, ~inputs_BT, inputs_BT), targets_BT.where(targets_BT >= 0, IGNORED)


def count_targets(targets_BT: Tensor) -> int:
    """Count the targets that the loss counts, of targets [B,T] or of windows without their first token."""
    return int((targets_BT >= 0).sum())


def divisor(targets: int, whole: int) -> float:
    """Return what turns the mean over some targets into their part of the mean over the `whole` batch's."""
    return whole / targets if whole and targets else math.inf


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Compute the mean cross-entropy over the targets that count, nats per token, in fp32 for logits of any dtype.

    It is 0 if none counts.
    """
    targets = targets_BT.flatten()
    mean = nn.functional.cross_entropy(
        logits_BTV.reshape(-1, logits_BTV.shape[-1]).float(), targets, ignore_index=IGNORED
    )
    return torch.where((targets != IGNORED).any(), mean, 0.0)
