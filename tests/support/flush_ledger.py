"""Which micro-batches have been trained, by their ids: each by all layers once, or by none. Pure.

The driver of a route owns it. A flush takes ids from the queue and ends in one of two ways: it is decided, and from
then on counts for every layer (a stage that hears of it late, steps late), or it is aborted, counts nothing, and its
ids go back to the front of the queue in their old order. There is no third way, and none of the two twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from atoll.core.errors import InvalidTransition


class FlushLedger:
    """A queue of micro-batches, at most one flush under way, and all that counts."""

    def __init__(self) -> None:
        self.flush = 0  # number of the flush under way, or of the last one; never used twice
        self.counted: set[int] = set()
        self.aborted_flushes = 0
        self._queue: deque[int] = deque()
        self._known: set[int] = set()
        self.under_way: tuple[int, ...] = ()  # ids of the flush that has not ended

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ids in the order in which flushes will take them."""
        return tuple(self._queue)

    def add(self, ids: Iterable[int]) -> None:
        """Queue micro-batches. Raises `InvalidTransition` for an id that was queued before."""
        for number in ids:
            if number in self._known:
                raise InvalidTransition(f"micro-batch {number} was queued before")
            self._known.add(number)
            self._queue.append(number)

    def begin(self, count: int) -> tuple[int, ...]:
        """The next flush takes `count` ids, or as many as there are. Raises `InvalidTransition` during another."""
        if self.under_way:
            raise InvalidTransition(f"flush {self.flush} is under way")
        if not self._queue or count < 1:
            raise InvalidTransition("a flush needs a micro-batch")
        self.flush += 1
        self.under_way = tuple(self._queue.popleft() for _ in range(min(count, len(self._queue))))
        return self.under_way

    def decide(self, flush: int) -> None:
        """Its gradients are whole on all stages, and all will step: its micro-batches count."""
        self.counted.update(self._end(flush))

    def abort(self, flush: int) -> None:
        """A stage died, stalled or sent nonsense before that: nothing counts, and its ids are queued again."""
        self._queue.extendleft(reversed(self._end(flush)))
        self.aborted_flushes += 1

    def _end(self, flush: int) -> tuple[int, ...]:
        if flush != self.flush or not self.under_way:
            raise InvalidTransition(f"flush {flush} is not under way")
        ended, self.under_way = self.under_way, ()
        return ended
