"""Counters of training that is not yet part of a committed round, and totals. Pure bookkeeping.

The counters start again with each round that counted this node. `mark_snapshot` marks what a snapshot contains.
`commit_snapshot` subtracts the marked part, which a manifest now counts. `discard_snapshot` forgets the mark. The
totals only grow; status and metrics show them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from atoll.node.training.sample_feed import SampleNumbers


@dataclass(frozen=True)
class Snapshot:
    """Training since the last round that counted this node, as of a snapshot.

    `samples` are the fresh ones, which leave this node's ranges; `tokens` includes those of repeated samples. The
    pseudo-gradient contains `fragment_tokens`: those since the last round that counted this node *and* averaged the
    same fragment.
    """

    tokens: int = 0
    samples: int = 0
    steps: int = 0
    fragment_tokens: int = 0


class Progress:
    """Counters since the last round that counted this node, and totals."""

    def __init__(self) -> None:
        self.steps_total = self.tokens_total = self.samples_repeated = 0
        self.reset()

    def reset(self) -> None:
        """Reset the counters after an anchor was loaded without a carry; totals stay."""
        self.tokens = self.samples = self.steps = 0
        self._tokens_at_load = self.tokens_total
        self._counted: list[tuple[int, int, int]] = []  # first element, end, tokens_total at the committed snapshot
        self._marked, self._fragment, self._marked_at = Snapshot(), (0, 0), 0

    def add(self, tokens: int, taken: SampleNumbers) -> None:
        """Count one inner step."""
        self.tokens += tokens
        self.samples += taken.fresh
        self.steps += 1
        self.tokens_total += tokens
        self.steps_total += 1
        self.samples_repeated += taken.repeated

    def mark_snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Mark the current state as the contents of a snapshot of elements [start, end), by default all.

        A fragment may be cut differently from earlier ones; then no token of any of its elements counts twice.
        """
        end = sys.maxsize if end is None else end
        counted = max((total for first, last, total in self._counted if first < end and start < last), default=0)
        in_fragment = self.tokens_total - max(counted, self._tokens_at_load)
        self._marked = Snapshot(self.tokens, self.samples, self.steps, in_fragment)
        self._fragment, self._marked_at = (start, end), self.tokens_total
        return self._marked

    def commit_snapshot(self) -> None:
        """Subtract the marked part, which a round committed; later training remains."""
        start, end = self._fragment
        others = [
            rest
            for first, last, total in self._counted
            for rest in ((first, min(last, start), total), (max(first, end), last, total))
            if rest[0] < rest[1]
        ]
        self._counted = [*others, (start, end, self._marked_at)]
        self.tokens -= self._marked.tokens
        self.samples -= self._marked.samples
        self.steps -= self._marked.steps
        self._marked = Snapshot()

    def subtract_consumed(self, samples: int) -> None:
        """Subtract samples that a round consumed from the start of the ranges without counting this progress."""
        self.samples = max(0, self.samples - samples)

    def discard_snapshot(self) -> None:
        """Forget the mark: the marked part was not committed and stays progress."""
        self._marked = Snapshot()
