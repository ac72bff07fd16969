"""What was trained and not counted by a round yet, and since when. Pure bookkeeping.

Counters run from one round that counted this node to the next: `freeze` marks what a snapshot holds, `commit` takes the
marked part away (it stands in a manifest now), `thaw` forgets the mark. The totals only grow; they are for status and
metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.training.feed import Taken


@dataclass(frozen=True)
class Snapshot:
    """Trained since the last round that counted this node, as of a snapshot.

    `samples` are the fresh ones, which leave this node's ranges; `tokens` counts repeated samples too. The
    pseudo-gradient holds `fragment_tokens`: those since the last round that counted this node *and* averaged the same
    fragment.
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
        """Forget progress (an anchor was loaded outright); totals stay."""
        self.tokens = self.samples = self.steps = 0
        self._loaded = self.tokens_total
        self._counted: dict[int, int] = {}  # fragment, by its first element → the total that its anchor holds
        self._frozen, self._fragment = Snapshot(), 0

    def add(self, tokens: int, taken: Taken) -> None:
        """One inner step was done."""
        self.tokens += tokens
        self.samples += taken.fresh
        self.steps += 1
        self.tokens_total += tokens
        self.steps_total += 1
        self.samples_repeated += taken.repeated

    def freeze(self, fragment: int = 0) -> Snapshot:
        """Mark the present as what a snapshot of the fragment that begins with this element holds."""
        in_fragment = self.tokens_total - self._counted.get(fragment, self._loaded)
        self._frozen, self._fragment = Snapshot(self.tokens, self.samples, self.steps, in_fragment), fragment
        return self._frozen

    def commit(self) -> None:
        """The marked part was committed; what came after it stays."""
        self._counted[self._fragment] = self._counted.get(self._fragment, self._loaded) + self._frozen.fragment_tokens
        self.tokens -= self._frozen.tokens
        self.samples -= self._frozen.samples
        self.steps -= self._frozen.steps
        self._frozen = Snapshot()

    def thaw(self) -> None:
        """The marked part was not committed; it stays progress."""
        self._frozen = Snapshot()
