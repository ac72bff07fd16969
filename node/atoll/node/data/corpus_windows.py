"""The windows of a corpus of shards for one run: their positions, the held-out ones, and the order of the others.

Window numbers go through the sources in the order of the card, and in a source through its shards. A window lies in one
shard, and in one unit of the order of samples (`data/sample_order.py`): the last window of a unit begins one token
earlier, because its last target would be the first token of another unit. So one pair of tokens in a unit is trained
twice and one never, and no block is fetched for one token.

The last windows of each source are held out for validation. Windows and their order are the same for all nodes: they
follow from the card, the run spec and the seed.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from atoll.core.errors import CorpusError
from atoll.core.run_spec import DataSection
from atoll.node.data.blocks import BLOCK_BYTES, CHUNK_BYTES
from atoll.node.data.card import CorpusCard, first_windows
from atoll.node.data.prefetch import Piece
from atoll.node.data.sample_order import ORDER_VERSION, ShardedOrder, SourceWindows, cut_into_units
from atoll.node.data.source_deal import WeighedSources, apportion


class CorpusWindows:
    """Samples number the trained windows in order of training; windows are numbered by position in the corpus."""

    def __init__(self, card: CorpusCard, card_digest: str, section: DataSection, seed: int) -> None:
        """Raises `CorpusError` if the corpus is too small for the run, or the run's mixture does not fit it."""
        self.card, self.sequence_length = card, section.sequence_length
        self.window_bytes = section.sequence_length * card.token_bytes
        self._shard_starts = [first_windows(source, section.sequence_length) for source in card.sources]
        counts = [starts[-1] for starts in self._shard_starts]
        self._source_starts = list(accumulate(counts, initial=0))
        if not any(counts):
            raise CorpusError(
                f"no shard of the corpus has {section.sequence_length + 1} tokens", "lower [data] sequence_length"
            )
        stages = mixture_stages(card, section, counts)
        self._held_out = held_out(counts, stages[0].weights, section.validation_samples)
        trained = [_without_last(starts, held) for starts, held in zip(self._shard_starts, self._held_out, strict=True)]
        self.sources = tuple((source.name, sum(windows)) for source, windows in zip(card.sources, trained, strict=True))
        self._refuse_empty_sources(stages, section)
        # without a mixture all shards are one source: every sample comes once in an epoch, however small its source is
        numbers = list(range(len(counts)))
        grouped = [[number] for number in numbers] if section.mixture else [numbers]
        self.mixture = stages if section.mixture else ()
        self._members = [
            [(number, shard) for number in group for shard in range(len(trained[number]))] for group in grouped
        ]
        groups = [self._cut_into_units(group, trained) for group in grouped]
        self._per_unit = [units.per_unit for units, group in zip(groups, grouped, strict=True) for _ in group]
        dealt = stages if section.mixture else (WeighedSources(0, (1.0,)),)
        weighed = [number for number in range(len(groups)) if any(stage.weights[number] for stage in dealt)]
        self.training_samples = sum(groups[number].windows for number in weighed)
        try:
            self._order = ShardedOrder(seed, groups, dealt, self.window_bytes)
        except ValueError as error:
            raise CorpusError(
                f"the run's mixture cannot be dealt: {error}", "give each source a larger weight"
            ) from error
        self.digest = _digest(card_digest, section, dealt, self._held_out)

    def _refuse_empty_sources(self, stages: Sequence[WeighedSources], section: DataSection) -> None:
        for number, source in enumerate(self.card.sources):
            if not self.sources[number][1] and any(stage.weights[number] for stage in stages):
                raise CorpusError(
                    f"the source {source.name} is too small: {source.tokens:,} tokens make "
                    f"{self._shard_starts[number][-1]} samples of {section.sequence_length} tokens, of which "
                    f"{self._held_out[number]} are held out",
                    "build a larger corpus, or lower [data] validation_samples or sequence_length",
                )

    def _cut_into_units(self, group: Sequence[int], trained: Sequence[Sequence[int]]) -> SourceWindows:
        """Cut the trained windows of some sources into units, as if they were one source."""
        tokens = sum(self.card.sources[number].tokens for number in group)
        windows = [count for number in group for count in trained[number]]
        return cut_into_units(windows, tokens * self.card.token_bytes, self.window_bytes)

    def __len__(self) -> int:
        return self._source_starts[-1]

    def window(self, sample: int) -> int:
        """Return the number of the window that sample number `sample` is."""
        group, member, window = self._order.place(sample)
        source, shard = self._members[group][member]
        return self._source_starts[source] + self._shard_starts[source][shard] + window

    def held_out_sets(self) -> list[tuple[str, Sequence[int]]]:
        """Return the numbers of held-out windows with the names of their sources. Sources without any are left out."""
        ends = zip(self.card.sources, self._source_starts[1:], self._held_out, strict=True)
        return [(source.name, range(end - held, end)) for source, end, held in ends if held]

    def place(self, window: int) -> tuple[int, int, int, int]:
        """Return the source, the shard and the range of bytes of a window."""
        source = bisect_right(self._source_starts, window) - 1
        inside, starts = window - self._source_starts[source], self._shard_starts[source]
        shard = bisect_right(starts, inside) - 1
        window, per_unit = inside - starts[shard], self._per_unit[source]
        first = window * self.sequence_length - (per_unit > 1 and window % per_unit == per_unit - 1)
        size = self.card.token_bytes
        return source, shard, first * size, (first + self.sequence_length + 1) * size

    def pieces_of(self, samples: Iterable[int]) -> Sequence[Piece]:
        """Return the ranges of blocks that these samples need, ordered by the first sample that needs their chunk."""
        needed: dict[tuple[int, int, int], set[int]] = {}
        for sample in samples:
            source, shard, start, stop = self.place(self.window(sample))
            for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
                chunk, inside = divmod(block, CHUNK_BYTES // BLOCK_BYTES)
                needed.setdefault((source, shard, chunk), set()).add(inside)
        return [(*where, first, last) for where, blocks in needed.items() for first, last in _runs(sorted(blocks))]


def mixture_stages(card: CorpusCard, section: DataSection, windows: Sequence[int]) -> Sequence[WeighedSources]:
    """Return the stages of the run's mixture over the card's sources. Raises `CorpusError` for an unknown source."""
    names = [source.name for source in card.sources]
    if not section.mixture:
        return (WeighedSources(0, tuple(float(count) for count in windows)),)
    stages = list[WeighedSources]()
    for stage in section.mixture:
        if unknown := sorted((stage.weights or stage.epochs or {}).keys() - set(names)):
            raise CorpusError(
                f"[data] mixture names the source {unknown[0]}, and the corpus has {', '.join(names)}",
                "name sources of the corpus: atoll data show lists them",
            )
        weights = tuple(
            stage.weights.get(name, 0.0) if stage.weights else (stage.epochs or {}).get(name, 0.0) * count
            for name, count in zip(names, windows, strict=True)
        )
        if not math.isfinite(math.fsum(weights)) or not any(weights):
            raise CorpusError("the weights of [data] mixture are too large, or name no source that has samples")
        stages.append(WeighedSources(stage.from_tokens // section.sequence_length, weights))
    return stages


def held_out(windows: Sequence[int], weights: Sequence[float], samples: int) -> Sequence[int]:
    """Return the number of held-out windows of each source: `samples` in all, by weight (largest remainder)."""
    return [min(count, there) for count, there in zip(apportion(weights, samples), windows, strict=True)]


def _without_last(starts: Sequence[int], held_out: int) -> tuple[int, ...]:
    """Return the windows of each shard that are trained: all but the source's last ones."""
    trained = starts[-1] - held_out
    return tuple(max(0, min(after, trained) - before) for before, after in pairwise(starts))


def _digest(card: str, section: DataSection, stages: Sequence[WeighedSources], held_out: Sequence[int]) -> str:
    """Return a digest of the tokens, their windows and their order; it must be equal on all nodes of a run."""
    named = {
        "card": card,
        "sequence_length": section.sequence_length,
        "order": ORDER_VERSION,
        "held_out": list(held_out),
        "mixture": [[stage.start, *stage.weights] for stage in stages],
    }
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _runs(numbers: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return the runs of consecutive numbers, half-open."""
    first = previous = numbers[0]
    for number in numbers[1:]:
        if number != previous + 1:
            yield first, previous + 1
            first = number
        previous = number
    yield first, previous + 1
