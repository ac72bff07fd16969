"""What was trained since the last applied anchor, and since when. Pure bookkeeping.

Counters run from anchor to anchor: `freeze` marks what a snapshot holds, `commit` takes the marked part away (it
stands in a manifest now), `thaw` forgets the mark. The totals only grow; they are for status and metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.training.feed import Taken


@dataclass(frozen=True)
class Snapshot:
    """Trained since the last applied anchor, frozen in the pseudo-gradient.

    `samples` are the fresh ones, which leave this node's ranges; `tokens` counts repeated samples too.
    """

    tokens: int = 0
    samples: int = 0
    steps: int = 0


class Progress:
    """Counters since the last applied anchor, and totals."""

    def __init__(self) -> None:
        self.steps_total = self.tokens_total = self.samples_repeated = 0
        self.reset()

    def reset(self) -> None:
        """Forget progress (an anchor was loaded outright); totals stay."""
        self.tokens = self.samples = self.steps = 0
        self._frozen = Snapshot()

    def add(self, tokens: int, taken: Taken) -> None:
        """One inner step was done."""
        self.tokens += tokens
        self.samples += taken.fresh
        self.steps += 1
        self.tokens_total += tokens
        self.steps_total += 1
        self.samples_repeated += taken.repeated

    def freeze(self) -> Snapshot:
        """Mark the present as what a snapshot holds."""
        self._frozen = Snapshot(self.tokens, self.samples, self.steps)
        return self._frozen

    def commit(self) -> None:
        """The marked part was committed; what came after it stays."""
        self.tokens -= self._frozen.tokens
        self.samples -= self._frozen.samples
        self.steps -= self._frozen.steps
        self._frozen = Snapshot()

    def thaw(self) -> None:
        """The marked part was not committed; it stays progress."""
        self._frozen = Snapshot()
