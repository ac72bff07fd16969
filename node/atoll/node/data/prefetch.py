"""Reads ahead of training: blocks for the next samples of a node's lease are fetched before a batch needs them.

The loader says which ranges it will train. It looks up the next `AHEAD_SAMPLES` samples together, so that
neighbouring windows share one request. A few threads fetch the blocks in the order of need.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from atoll.core import log
from atoll.core.data_position import SampleRange, sample_count
from atoll.core.errors import AtollError

AHEAD_SAMPLES = 4096
AHEAD_BYTES = 16 << 20
_THREADS = 8

Piece = tuple[int, int, int, int, int]  # source, shard, chunk, first and last block (exclusive)


class Prefetcher:
    """Fetches pieces ahead. Call `close` at the end: it owns threads."""

    def __init__(
        self,
        pieces_of: Callable[[Iterable[int]], Sequence[Piece]],
        ensure: Callable[[int, int, int, int, int], None],
        ahead_samples: int,
    ) -> None:
        """`pieces_of`: the pieces that samples need, in the order of need."""
        self._pieces_of, self._ensure, self._ahead = pieces_of, ensure, ahead_samples
        self._changed = threading.Condition()
        self._wanted: tuple[SampleRange, ...] = ()
        self._planned: tuple[SampleRange, ...] = ()  # parts of `_wanted` that were looked up, in order
        self._closed = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="corpus-ahead")
        self._thread = threading.Thread(target=self._plan, name="corpus-plan", daemon=True)
        self._thread.start()

    def follow(self, ranges: Sequence[SampleRange]) -> None:
        """Fetch the blocks for the first samples of these ranges.

        Returns at once; call it again as samples are trained.
        """
        with self._changed:
            self._wanted = _first_samples(ranges, self._ahead)
            self._changed.notify_all()

    def close(self) -> None:
        """Start no further reads. Running reads end by themselves."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(timeout=10)

    def _plan(self) -> None:
        while (new := self._wait_for_work()) is not None:
            pieces = self._pieces_of(number for start, end in new for number in range(start, end))
            with self._changed:
                if self._closed:
                    return
                for piece in pieces:
                    self._pool.submit(self._fetch, piece)

    def _wait_for_work(self) -> Sequence[SampleRange] | None:
        """Return samples to look up: at least a quarter of the read-ahead, or all if fewer are wanted."""
        with self._changed:
            while not self._closed:
                planned = _common(self._planned, self._wanted)
                new = _without(self._wanted, planned)
                if new and (sample_count(new) >= self._ahead // 4 or sample_count(self._wanted) < self._ahead):
                    self._planned = (*planned, *new)
                    return new
                self._changed.wait()
            return None

    def _fetch(self, piece: Piece) -> None:
        try:
            self._ensure(*piece)
        except AtollError as error:  # the batch that needs the piece tries again, and reports a failure
            if not self._closed:
                log.get("corpus").warning("prefetch_failed", problem=str(error))


def _first_samples(ranges: Sequence[SampleRange], count: int) -> tuple[SampleRange, ...]:
    found = list[SampleRange]()
    for start, end in ranges:
        if count <= 0:
            break
        found.append((start, min(end, start + count)))
        count -= found[-1][1] - start
    return tuple(found)


def _common(some: Sequence[SampleRange], others: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    """Return the parts of `some` that are in `others`."""
    pieces = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return tuple((start, end) for start, end in pieces if start < end)


def _without(some: Sequence[SampleRange], others: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    """Return the parts of `some` that are not in `others`, in the order of `some`."""
    left = list(some)
    for start, end in others:
        left = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b)) if piece[0] < piece[1]]
    return tuple(left)
