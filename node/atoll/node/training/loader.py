"""Loader of training batches: a thread turns sample numbers into token tensors while the model computes.

It counts the seconds that training waited for it. `restart` gives it a new feed and drops the batches prepared from the
old one. Dropped batches do not count as consumed: the training loop counts consumption when a step is done. While the
corpus cannot be fetched, the loader retries and gives the reason in `trouble`: a home connection can fail for minutes.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from atoll.core.clock import Clock
from atoll.core.errors import AtollError, DeadlineExceeded, Unreachable
from atoll.node.data.data_report import DataReport
from atoll.node.data.sharded_corpus import ShardedCorpus, TrainingCorpus
from atoll.node.training.sample_feed import SampleFeed, SampleNumbers

_PREFETCH_BATCHES = 2  # batches prepared ahead
_BATCH_TIMEOUT = timedelta(minutes=15)
_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Batch:
    """The tokens of one inner step, int64 [B, T+1] on the host, and their sample numbers."""

    tokens_BT: Tensor
    taken: SampleNumbers


class Loader:
    """A prefetcher of `samples_per_step` samples at a time. `close` ends its thread."""

    def __init__(self, corpus: TrainingCorpus, samples_per_step: int, clock: Clock, pin: bool = False) -> None:
        self.stall_seconds = 0.0
        self._samples_taken = 0
        self._corpus, self._samples_per_step, self._clock, self._pin = corpus, samples_per_step, clock, pin
        self._feed = SampleFeed()
        self._generation = 0
        self._ready: deque[Batch] = deque()
        self._closed = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._prefetch, name="loader", daemon=True)
        self._thread.start()

    @property
    def empty(self) -> bool:
        """True if there is nothing to train."""
        return self._feed.empty

    def restart(self, feed: SampleFeed) -> None:
        """Continue with another feed."""
        with self._changed:
            self._feed = feed
            self._generation += 1
            self._ready.clear()
            self._corpus.follow(feed.upcoming)
            self._changed.notify_all()

    @property
    def report(self) -> DataReport:
        """Counts of the text read so far. Empty if the node has the whole text."""
        return (
            self._corpus.data_report(self._samples_taken) if isinstance(self._corpus, ShardedCorpus) else DataReport()
        )

    @property
    def trouble(self) -> str:
        """Why the next batch is late; empty while batches arrive."""
        return "" if self._ready or not isinstance(self._corpus, ShardedCorpus) else self._corpus.trouble

    def wait(self, seconds: float) -> bool:
        """Wait for the next batch. Returns whether `next` will return or raise without waiting."""
        with self._changed:
            return self._wait(seconds)

    def _wait(self, seconds: float) -> bool:
        if self._ready:
            return True
        started = self._clock.monotonic()
        arrived = self._changed.wait_for(lambda: self._ready or self._failure, seconds)
        self.stall_seconds += self._clock.monotonic() - started
        return bool(arrived)

    def next(self) -> Batch:
        """Return the next batch. Raises `DeadlineExceeded` if it does not arrive in time, and errors of the thread."""
        with self._changed:
            if not self._wait(_BATCH_TIMEOUT.total_seconds()):
                raise DeadlineExceeded(
                    f"no training batch within {_BATCH_TIMEOUT.total_seconds():.0f} s",
                    "check the disk with the training text, or the line to its mirrors",
                )
            if not self._ready and self._failure is not None:
                raise self._failure
            batch = self._ready.popleft()
            self._samples_taken += len(batch.taken.samples)
            self._changed.notify_all()
            return batch

    def close(self) -> None:
        """End this thread and the threads of the corpus."""
        self._corpus.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=_BATCH_TIMEOUT.total_seconds())

    def _prefetch(self) -> None:
        while (work := self._wait_for_work()) is not None:
            generation, taken = work
            try:
                batch = self._build(taken, generation)
            except (OSError, ValueError, RuntimeError, AtollError) as error:  # `next` raises it in the training thread
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                if batch is not None and generation == self._generation:
                    self._ready.append(batch)
                    self._changed.notify_all()

    def _wait_for_work(self) -> tuple[int, SampleNumbers] | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (len(self._ready) < _PREFETCH_BATCHES and not self._feed.empty)
            )
            if self._closed:
                return None
            taken = self._feed.take(self._samples_per_step)
            self._corpus.follow(self._feed.upcoming)
            return self._generation, taken

    def _build(self, taken: SampleNumbers, generation: int) -> Batch | None:
        windows = [self._corpus.window(sample) for sample in taken.samples]
        while generation == self._generation and not self._closed:
            try:
                tokens_BT = torch.from_numpy(self._corpus.windows(windows))
            except Unreachable:
                self._pause()
                continue
            return Batch(tokens_BT.pin_memory() if self._pin else tokens_BT, taken)
        return None

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, _RETRY_SECONDS)
