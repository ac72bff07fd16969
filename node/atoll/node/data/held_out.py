"""Held-out loss of a corpus: of each source and of all, measured in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.node.data.sharded_corpus import ShardedCorpus, TrainingCorpus


class SourceLoss(NamedTuple):
    """Mean loss over the held-out windows of one source, nats per token."""

    name: str
    loss: float
    windows: int


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean loss over all held-out windows, nats per token. `sources`: parts of it, if there are several."""

    value: float
    sources: tuple[SourceLoss, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[SourceLoss]) -> HeldOutLoss:
        """Add up the sources, at least one."""
        windows = sum(part.windows for part in parts)
        mean = sum(part.loss * part.windows for part in parts) / windows
        return cls(mean, tuple(parts) if len(parts) > 1 else ())


def held_out_sets(corpus: TrainingCorpus) -> list[tuple[str, Sequence[int]]]:
    """Return the held-out windows by source; a text that a node has whole is one source without a name."""
    if isinstance(corpus, ShardedCorpus):
        return corpus.held_out_sets()
    return [("", corpus.validation_windows())]
