"""Loader of training batches: a thread turns sample numbers into token tensors while the model computes.

It counts the seconds that training waited for it. `restart` gives it a new feed and drops the batches prepared from the
old one. Dropped batches do not count as consumed: the training loop counts consumption when a step is done.

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
from atoll.core.errors import DeadlineExceeded
from atoll.node.data.corpus import Corpus
from atoll.node.data.sample_order import SampleOrder
from atoll.node.training.sample_feed import SampleFeed, SampleNumbers

_PREFETCH_BATCHES = 2  # batches prepared ahead
_BATCH_TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True)
class Batch:
    """The tokens of one inner step, int64 [B, T+1] on the host, and their sample numbers."""

    tokens_BT: Tensor
    taken: SampleNumbers


class Loader:
    """A prefetcher of `samples_per_step` samples at a time. `close` ends its thread."""

    def __init__(self, corpus: Corpus, seed: int, samples_per_step: int, clock: Clock, pin: bool = False) -> None:
        self.stall_seconds = 0.0
        self._corpus, self._samples_per_step, self._clock, self._pin = corpus, samples_per_step, clock, pin
        self._order = SampleOrder(seed, corpus.training_samples)
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
            self._changed.notify_all()

    def next(self) -> Batch:
        """Return the next batch. Raises `DeadlineExceeded` if it does not arrive in time, and errors of the thread."""
        with self._changed:
            if not self._ready:
                started = self._clock.monotonic()
                arrived = self._changed.wait_for(lambda: self._ready or self._failure, _BATCH_TIMEOUT.total_seconds())
                self.stall_seconds += self._clock.monotonic() - started
                if self._failure is not None:
                    raise self._failure
                if not arrived:
                    raise DeadlineExceeded(
                        f"no training batch within {_BATCH_TIMEOUT.total_seconds():.0f} s",
                        "check the disk with the training text",
                    )
            batch = self._ready.popleft()
            self._changed.notify_all()
            return batch

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=_BATCH_TIMEOUT.total_seconds())

    def _prefetch(self) -> None:
        while (work := self._wait_for_work()) is not None:
            generation, taken = work
            try:
                batch = self._build(taken)
            except (OSError, ValueError, RuntimeError) as error:  # `next` raises it in the training thread
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                if generation == self._generation:
                    self._ready.append(batch)
                    self._changed.notify_all()

    def _wait_for_work(self) -> tuple[int, SampleNumbers] | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (len(self._ready) < _PREFETCH_BATCHES and not self._feed.empty)
            )
            if self._closed:
                return None
            return self._generation, self._feed.take(self._samples_per_step)

    def _build(self, taken: SampleNumbers) -> Batch:
        windows = [self._order.window(sample) for sample in taken.samples]
        tokens_BT = torch.from_numpy(self._corpus.windows(windows))
        return Batch(tokens_BT.pin_memory() if self._pin else tokens_BT, taken)
