"""Held-out loss of an anchor over a route: the driver's bookkeeping.

An evaluation is a series of forward-only flushes of several micro-batches each. Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.node.data.sharded_corpus import TrainingCorpus
from atoll.node.training.targets import count_targets

Outcome = float | AtollError


class Evaluation:
    """One evaluation. `done` gets the loss in nats per token, or the error that prevents it."""

    def __init__(self, corpus: TrainingCorpus, samples: int, anchor: int, done: Callable[[Outcome], None]) -> None:
        """`samples` of a micro-batch. `anchor`: the committed tokens of the anchor to evaluate."""
        self.anchor, self._done = anchor, done
        self._corpus, self._samples = corpus, samples
        self._windows = list(corpus.validation_windows())
        self._flush_weight = 0.0  # its targets, in samples
        self._total, self._weight = 0.0, 0.0

    def next(self, most: int) -> list[Tensor]:
        """Tokens [B,T+1] of the next flush: at most `most` micro-batches, all of the same size."""
        size = min(self._samples, len(self._windows))
        count = min(most, len(self._windows) // size)
        taken, self._windows = self._windows[: count * size], self._windows[count * size :]
        tokens_BT = torch.from_numpy(self._corpus.windows(taken, soon=True))
        self._flush_weight = count_targets(tokens_BT) / self._corpus.sequence_length
        return list(torch.split(tokens_BT, size))

    def add(self, loss: float) -> bool:
        """Add the mean loss of the flush. Returns True, and calls `done`, after the last one."""
        self._total += loss * self._flush_weight
        self._weight += self._flush_weight
        if not self._windows:
            self._done(self._total / self._weight if self._weight else 0.0)
        return not self._windows

    def fail(self, error: AtollError) -> None:
        """End the evaluation without a loss."""
        self._done(error)
