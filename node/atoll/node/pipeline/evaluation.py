"""Held-out loss of an anchor over a route: the driver's bookkeeping.

An evaluation is a series of forward-only flushes of several micro-batches each. Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.node.data.held_out import HeldOutLoss, SourceLoss, held_out_sets
from atoll.node.data.sharded_corpus import TrainingCorpus
from atoll.node.training.targets import count_targets

Outcome = HeldOutLoss | AtollError


class Evaluation:
    """One evaluation. It calls `done` with the loss, or with the error that prevented it."""

    def __init__(self, corpus: TrainingCorpus, samples: int, anchor: int, done: Callable[[Outcome], None]) -> None:
        """`samples`: of a micro-batch. `anchor`: the committed tokens of the anchor to evaluate."""
        self.anchor, self._done = anchor, done
        self._corpus, self._samples = corpus, samples
        self._sets = held_out_sets(corpus)
        self._done_sets: list[SourceLoss] = []
        self._flush_weight = 0.0  # its targets, in samples
        self._taken = self._flush_windows = 0  # windows taken of the current set, and in this flush
        self._total = self._weight = 0.0  # sums over the current set

    def next(self, most: int) -> list[Tensor]:
        """Tokens [B,T+1] of the next flush: at most `most` micro-batches of one set. All have the same size."""
        windows = self._sets[0][1][self._taken :]
        size = min(self._samples, len(windows))
        taken = windows[: min(most, len(windows) // size) * size]
        tokens_BT = torch.from_numpy(self._corpus.windows(taken, soon=True))
        self._flush_windows, self._flush_weight = len(taken), count_targets(tokens_BT) / self._corpus.sequence_length
        return list(torch.split(tokens_BT, size))

    def add(self, loss: float) -> bool:
        """Add the mean loss of the flush. After the last flush, call `done` and return True."""
        self._total += loss * self._flush_weight
        self._weight += self._flush_weight
        self._taken += self._flush_windows
        name, windows = self._sets[0]
        if self._taken < len(windows):
            return False
        self._done_sets.append(SourceLoss.of(name, self._total, self._weight, len(windows)))
        self._sets, self._taken, self._total, self._weight = self._sets[1:], 0, 0.0, 0.0
        if not self._sets:
            self._done(HeldOutLoss.of(self._done_sets))
        return not self._sets

    def fail(self, error: AtollError) -> None:
        """End the evaluation without a loss."""
        self._done(error)
