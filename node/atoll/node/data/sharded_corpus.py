"""A corpus of shards, as training sees it: windows of tokens by number, fetched when they are needed or before.

Window numbers go through the sources in the order of the card, and in a source through its shards. A window lies in one
shard, and in one unit of the order of samples (`data/sample_order.py`): the last window of a unit begins one token
earlier, because its last target would be the first token of another unit. So one pair of tokens in a unit is trained
twice and one never, and no block is fetched for one token.

The last windows of each source are held out for validation. Windows and their order are the same for all nodes: they
follow from the card, the run spec and the seed.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from atoll.core.data_position import SampleRange
from atoll.core.errors import CorpusError
from atoll.core.run_spec import DataSection
from atoll.node.data.block_reader import BlockReader
from atoll.node.data.blocks import BLOCK_BYTES, CHUNK_BYTES
from atoll.node.data.card import CorpusCard, first_windows, start_bit, top_bit
from atoll.node.data.corpus import Corpus
from atoll.node.data.data_report import DataReport, MirrorReport
from atoll.node.data.documents import document_separator, mark_starts, starts_after
from atoll.node.data.fetcher import Fetcher
from atoll.node.data.prefetch import AHEAD_BYTES, AHEAD_SAMPLES, Piece, Prefetcher
from atoll.node.data.sample_order import ORDER_VERSION, ShardedOrder, cut_into_units
from atoll.node.data.source_deal import WeighedSources, apportion
from atoll.node.model.tokenizer import Tokenizer

_SOON_SECONDS = 15.0


class ShardedCorpus:
    """Windows of a corpus of shards. Call `close` at the end: it owns threads."""

    def __init__(
        self,
        card: CorpusCard,
        digest: str,
        section: DataSection,
        seed: int,
        tokenizer: Tokenizer,
        fetcher: Fetcher,
        reader: BlockReader,
    ) -> None:
        """`digest` is that of the card.

        Raises `CorpusError` if the run's mixture does not fit the corpus, and for document masks if it does not tell
        where documents start; `ConfigError` for document masks without a separator.
        """
        self._masks = section.document_masks
        if self._masks and card.marks and not card.starts:  # chat templates end each turn with the separator
            raise CorpusError(
                "[data] document_masks needs to know where documents start, and this corpus of instruction data, which "
                "an earlier release built, does not tell it",
                "build the corpus again, or remove document_masks",
            )
        self._separator = None if card.starts else document_separator(section, tokenizer)
        self.card, self.tokenizer, self.fetcher, self.reader = card, tokenizer, fetcher, reader
        self.sequence_length = section.sequence_length
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
        for number, source in enumerate(card.sources):
            if not sum(trained[number]) and any(stage.weights[number] for stage in stages):
                raise CorpusError(
                    f"the source {source.name} is too small: {source.tokens:,} tokens make {counts[number]} samples "
                    f"of {section.sequence_length} tokens, of which {self._held_out[number]} are held out",
                    "build a larger corpus, or lower [data] validation_samples or sequence_length",
                )
        window_bytes = section.sequence_length * card.token_bytes
        # without a mixture all shards are one source: every sample comes once in an epoch, however small its source is
        numbers = list(range(len(counts)))
        grouped = [[number] for number in numbers] if section.mixture else [numbers]
        sources = [
            cut_into_units(
                [windows for number in group for windows in trained[number]],
                sum(card.sources[number].tokens for number in group) * card.token_bytes,
                window_bytes,
            )
            for group in grouped
        ]
        self._members = [
            [(number, shard) for number in group for shard in range(len(trained[number]))] for group in grouped
        ]
        self._per_unit = [source.per_unit for source, group in zip(sources, grouped, strict=True) for _ in group]
        dealt = stages if section.mixture else (WeighedSources(0, (1.0,)),)
        self.mixture = stages if section.mixture else ()
        self.sources = tuple((source.name, sum(windows)) for source, windows in zip(card.sources, trained, strict=True))
        weighed = [number for number in range(len(sources)) if any(stage.weights[number] for stage in dealt)]
        self.training_samples = sum(sources[number].windows for number in weighed)
        try:
            self._order = ShardedOrder(seed, sources, dealt, window_bytes)
        except ValueError as error:
            raise CorpusError(
                f"the run's mixture cannot be dealt: {error}", "give each source a larger weight"
            ) from error
        self.digest = _digest(digest, section, dealt, self._held_out)
        self._prefetcher = Prefetcher(
            self._pieces_of, reader.ensure, min(AHEAD_SAMPLES, max(64, AHEAD_BYTES // window_bytes))
        )

    def window(self, sample: int) -> int:
        """Return the window of sample number `sample`."""
        group, member, window = self._order.place(sample)
        source, shard = self._members[group][member]
        return self._source_starts[source] + self._shard_starts[source][shard] + window

    def windows(self, indices: Sequence[int], soon: bool = False) -> NDArray[np.int64]:
        """Return windows by number, [B, T+1], like `Corpus.windows`. Raises `Unreachable` if a block cannot be fetched.

        What is input only, or starts a document of a run with document masks, is marked (`documents.py`).

        `soon`: within some seconds, for a caller who has other things to do.
        """
        with self.fetcher.impatient(_SOON_SECONDS) if soon else nullcontext():
            return self._windows(indices)

    def _windows(self, indices: Sequence[int]) -> NDArray[np.int64]:
        dtype, rows = self.card.dtype, list[NDArray[np.unsignedinteger]]()
        for index in indices:
            source, shard, start, stop = self.place(index)
            rows.append(np.frombuffer(self.reader.read(source, shard, start, stop), dtype=dtype))
        stored_BT = np.stack(rows).astype(np.int64)
        windows_BT = stored_BT & self.card.token_mask
        if windows_BT.max() >= self.card.tokenizer.vocabulary:  # the builder of the corpus lied: hashes are right
            raise CorpusError("the corpus contains tokens that are not in its vocabulary", "build the corpus again")
        starts_BT: NDArray[np.bool_] | None = None
        if self._masks and self.card.starts:
            starts_BT = (stored_BT & start_bit(dtype)) > 0
        elif self._separator is not None:
            starts_BT = starts_after(windows_BT, self._separator)
        if self.card.marks:
            windows_BT = np.where(stored_BT & top_bit(dtype), ~windows_BT, windows_BT)
        return windows_BT if starts_BT is None else mark_starts(windows_BT, starts_BT)

    def validation_windows(self) -> Sequence[int]:
        """Return the numbers of the held-out windows."""
        return [window for _, windows in self.held_out_sets() for window in windows]

    def held_out_sets(self) -> list[tuple[str, Sequence[int]]]:
        """Return them with the names of their sources. Sources without any are left out."""
        ends = zip(self.card.sources, self._source_starts[1:], self._held_out, strict=True)
        return [(source.name, range(end - held, end)) for source, end, held in ends if held]

    def follow(self, ranges: Sequence[SampleRange]) -> None:
        """Fetch what the first samples of these ranges need. Returns at once."""
        self._prefetcher.follow(ranges)

    @property
    def trouble(self) -> str:
        """Why nothing can be fetched now; empty while some mirror answers."""
        return self.fetcher.trouble

    def data_report(self, samples_trained: int) -> DataReport:
        """Return what was read until now."""
        return DataReport(
            self.fetcher.bytes_fetched,
            samples_trained * self.sequence_length * self.card.token_bytes,
            self.reader.blocks,
            tuple(MirrorReport(it.mirror.name, it.mirror.kind, it.bytes, it.problem) for it in self.fetcher.mirrors),
        )

    def close(self) -> None:
        """End the threads."""
        self.fetcher.close()
        self._prefetcher.close()

    def place(self, window: int) -> tuple[int, int, int, int]:
        """Return the source, the shard and the range of bytes of a window."""
        source = bisect_right(self._source_starts, window) - 1
        inside, starts = window - self._source_starts[source], self._shard_starts[source]
        shard = bisect_right(starts, inside) - 1
        window, per_unit = inside - starts[shard], self._per_unit[source]
        first = window * self.sequence_length - (per_unit > 1 and window % per_unit == per_unit - 1)
        size = self.card.token_bytes
        return source, shard, first * size, (first + self.sequence_length + 1) * size

    def _pieces_of(self, samples: Iterable[int]) -> Sequence[Piece]:
        """Return runs of blocks that these samples need, in the order of the first need of their chunk."""
        needed: dict[tuple[int, int, int], set[int]] = {}
        for sample in samples:
            source, shard, start, stop = self.place(self.window(sample))
            for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
                chunk, inside = divmod(block, CHUNK_BYTES // BLOCK_BYTES)
                needed.setdefault((source, shard, chunk), set()).add(inside)
        return [(*where, first, last) for where, blocks in needed.items() for first, last in _runs(sorted(blocks))]


TrainingCorpus = Corpus | ShardedCorpus


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
    """Return how many windows of each source are held out: `samples` in all, by weight (largest remainder)."""
    return [min(count, there) for count, there in zip(apportion(weights, samples), windows, strict=True)]


def _without_last(starts: Sequence[int], held_out: int) -> tuple[int, ...]:
    """Return the windows of each shard that are trained: all but the source's last ones."""
    trained = starts[-1] - held_out
    return tuple(max(0, min(after, trained) - before) for before, after in pairwise(starts))


def _digest(card: str, section: DataSection, stages: Sequence[WeighedSources], held_out: Sequence[int]) -> str:
    """Identify tokens, their cut into windows, and their order; nodes of one run must agree on it."""
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
