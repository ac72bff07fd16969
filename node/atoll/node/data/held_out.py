"""Held-out loss of a corpus: of each source and of all, measured in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.node.data.sharded_corpus import ShardedCorpus, TrainingCorpus


class SourceLoss(NamedTuple):
    """Mean loss over the targets in the held-out windows of one source, nats per token."""

    name: str
    loss: float
    windows: int
    weight: float  # number of its targets, in windows: between few and all tokens of a window are targets

    @classmethod
    def of(cls, name: str, total: float, weight: float, windows: int) -> SourceLoss:
        """`total`: the sum of mean losses, each multiplied by its weight. Without targets the loss is 0."""
        return cls(name, total / weight if weight else 0.0, windows, weight)


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean loss over all held-out targets, nats per token. `sources`: parts of it, if there are several."""

    value: float
    sources: tuple[SourceLoss, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[SourceLoss]) -> HeldOutLoss:
        """Add up the sources, at least one."""
        weight = sum(part.weight for part in parts)
        mean = sum(part.loss * part.weight for part in parts) / weight if weight else 0.0
        return cls(mean, tuple(part for part in parts if part.weight) if len(parts) > 1 else ())


def held_out_sets(corpus: TrainingCorpus) -> list[tuple[str, Sequence[int]]]:
    """Return the held-out windows by source; a corpus that a node has whole is one source without a name."""
    if isinstance(corpus, ShardedCorpus):
        return corpus.held_out_sets()
    return [("", corpus.validation_windows())]
