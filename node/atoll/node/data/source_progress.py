"""How much of each source a run with a mixture has trained. Pure: computed from the committed data position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atoll.core.data_position import DataPosition
from atoll.node.data.source_deal import SourceDeal, WeighedSources

_MOST_SAMPLES = 1 << 62  # in a position that can be counted


class SourceProgress(NamedTuple):
    """One source: tokens trained, their share of all, the share by weight, and passes over the source."""

    name: str
    tokens: int
    share: float
    share_wanted: float
    epochs: float


class MixtureProgress:
    """Counts sources. `sources`: name and samples of one epoch of each, in the order of the weights."""

    def __init__(
        self, sources: Sequence[tuple[str, int]], stages: Sequence[WeighedSources], sample_tokens: int
    ) -> None:
        self._sources, self._sample_tokens = sources, sample_tokens
        self._deal = SourceDeal(stages)

    def at(self, position: DataPosition) -> tuple[SourceProgress, ...]:
        """Return the sources that have a weight or were trained.

        Samples in `returned` and `holdings` are not trained yet.
        """
        held = [*position.returned, *(piece for ranges in position.holdings.values() for piece in ranges)]
        if max([position.cursor, *(end for _, end in held)]) > _MOST_SAMPLES:
            return ()
        whole = [(0, position.cursor)]
        counts = self._deal.counts(whole) - self._deal.counts(held)
        wanted = self._deal.wanted(whole) - self._deal.wanted(held)
        total = max(1, int(counts.sum()))
        return tuple(
            SourceProgress(name, int(count) * self._sample_tokens, count / total, want / total, count / max(1, samples))
            for (name, samples), count, want in zip(self._sources, counts, wanted, strict=True)
            if count or want
        )
