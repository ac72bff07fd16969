"""A corpus of shards, as training sees it: windows of tokens by number, fetched when they are needed or before.

`corpus_windows.py` says which windows there are, and in which order they are trained.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

from atoll.core.data_position import SampleRange
from atoll.core.errors import CorpusError
from atoll.core.run_spec import DataSection
from atoll.node.data.block_reader import BlockReader
from atoll.node.data.card import CorpusCard, start_bit, top_bit
from atoll.node.data.corpus import Corpus
from atoll.node.data.corpus_windows import CorpusWindows
from atoll.node.data.data_report import DataReport, MirrorReport
from atoll.node.data.documents import document_separator, mark_starts, starts_after
from atoll.node.data.fetcher import Fetcher
from atoll.node.data.prefetch import AHEAD_BYTES, AHEAD_SAMPLES, Prefetcher
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
        self._cut = cut = CorpusWindows(card, digest, section, seed)
        self.card, self.tokenizer, self.fetcher, self.reader = card, tokenizer, fetcher, reader
        self.sequence_length, self.digest, self.sources = section.sequence_length, cut.digest, cut.sources
        self.mixture, self.training_samples = cut.mixture, cut.training_samples
        self._prefetcher = Prefetcher(
            cut.pieces_of, reader.ensure, min(AHEAD_SAMPLES, max(64, AHEAD_BYTES // cut.window_bytes))
        )

    def window(self, sample: int) -> int:
        """Return the window of sample number `sample`."""
        return self._cut.window(sample)

    def place(self, window: int) -> tuple[int, int, int, int]:
        """Return the source, the shard and the range of bytes of a window."""
        return self._cut.place(window)

    def windows(self, indices: Sequence[int], soon: bool = False) -> NDArray[np.int64]:
        """Return windows by number, [B, T+1], like `Corpus.windows`. Raises `Unreachable` if a block cannot be fetched.

        What is input only, or starts a document of a run with document masks, is marked (`documents.py`).

        `soon`: give up after some seconds, for a caller that must not wait long.
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
        """Return the numbers of held-out windows by source. Sources without held-out windows are left out."""
        return self._cut.held_out_sets()

    def follow(self, ranges: Sequence[SampleRange]) -> None:
        """Fetch the blocks for the first samples of these ranges. Returns at once."""
        self._prefetcher.follow(ranges)

    @property
    def trouble(self) -> str:
        """Why nothing can be fetched now; empty while some mirror answers."""
        return self.fetcher.trouble

    def data_report(self, samples_trained: int) -> DataReport:
        """Return counts of the text read so far."""
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


TrainingCorpus = Corpus | ShardedCorpus
