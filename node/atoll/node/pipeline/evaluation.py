"""The held-out loss of an anchor over a route: some micro-batches a flush, forward only. Bookkeeping of the driver.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.node.training.corpus import Corpus

Outcome = float | AtollError


class Evaluation:
    """From the order to its answer; `done` is told the loss in nats per token, or why there is none."""

    def __init__(self, corpus: Corpus, samples: int, anchor: int, done: Callable[[Outcome], None]) -> None:
        self.anchor, self._done = anchor, done  # committed tokens
        self._corpus, self._samples = corpus, samples
        self._windows = list(corpus.validation_windows())
        self._flush_samples = 0  # samples of the flush
        self._total, self._count = 0.0, 0

    def next(self, most: int) -> list[Tensor]:
        """Tokens [B,T+1] of the next flush, of so many micro-batches at most and all of one size."""
        size = min(self._samples, len(self._windows))
        count = min(most, len(self._windows) // size)
        taken, self._windows = self._windows[: count * size], self._windows[count * size :]
        self._flush_samples = len(taken)
        return list(torch.split(torch.from_numpy(self._corpus.windows(taken)), size))

    def add(self, loss: float) -> bool:
        """The mean loss of that flush; whether it was the last one."""
        self._total += loss * self._flush_samples
        self._count += self._flush_samples
        if not self._windows:
            self._done(self._total / self._count)
        return not self._windows

    def fail(self, error: AtollError) -> None:
        """There will be no loss."""
        self._done(error)
