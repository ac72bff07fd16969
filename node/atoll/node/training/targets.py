"""Inputs, targets and document starts of windows, and the loss over the targets that count.

A corpus gives a token that is input only, and no target, as its bitwise complement (`~token`, negative). For a run with
document masks it marks the first token of each document (`data/documents.py`).

The loss of an inner step is the mean over all targets that count in its batch: a part of the batch contributes its own
mean, divided by how many times as many targets the batch has (`divisor`).

Shape suffixes: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atoll.node.data.documents import DOCUMENT_START

IGNORED = -100  # a target that does not count
ZERO_WEIGHT_DIVISOR = math.inf  # divisor of a loss that must not count


def inputs_and_targets(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets, int64 [B,T] each, of a corpus's windows [B,T+1]."""
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    return _numbers(inputs_BT) & (DOCUMENT_START - 1), targets_BT.masked_fill(targets_BT < 0, IGNORED)


def document_starts(tokens_BT: Tensor) -> Tensor:
    """Return which inputs of a corpus's windows [B,T+1] start a document, bool [B,T]; each window's first one does."""
    starts_BT = _numbers(tokens_BT[:, :-1]) >= DOCUMENT_START
    starts_BT[:, 0] = True
    return starts_BT


def _numbers(tokens_BT: Tensor) -> Tensor:
    """Return the token numbers, without complements."""
    return tokens_BT ^ (tokens_BT >> 63)


def count_targets(tokens_BT: Tensor) -> int:
    """Count the targets of windows [B,T+1]; for windows on the host, without waiting for a device."""
    return int((tokens_BT[:, 1:] >= 0).sum())


def divisor(targets_of_all: int, targets_of_part: int) -> float:
    """Return the divisor for the mean loss of a part, so that the parts add up to the mean over all targets."""
    return targets_of_all / targets_of_part if targets_of_all and targets_of_part else ZERO_WEIGHT_DIVISOR


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Compute the mean cross-entropy over the targets that count, nats per token, in fp32 for logits of any dtype.

    Without any such target it is 0, with a gradient of 0.
    """
    logits = logits_BTV.reshape(-1, logits_BTV.shape[-1]).float()
    mean = nn.functional.cross_entropy(logits, targets_BT.flatten(), ignore_index=IGNORED)
    return torch.where((targets_BT != IGNORED).any(), mean, torch.zeros_like(mean))
