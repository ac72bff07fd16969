"""Which samples this node trains next: a list of half-open ranges, consumed in order. Pure.

The manifest lists the ranges that a node had not consumed as of its snapshot. What it trained between the
snapshot and the manifest came from the beginning of those ranges, so a new list starts with a `skip`. When the
ranges run dry before the next manifest comes, the last list is read again and counted as repeated: training
never stops for lack of a manifest. Repeated samples are not consumption; the data position of the run
(`core/data_position.py`) moves by fresh samples only, so nobody's samples are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.data_position import SampleRange, drop_samples


@dataclass(frozen=True)
class SampleNumbers:
    """Sample numbers for one step; the first `fresh` of them are new, the rest are repeated."""

    samples: tuple[int, ...]
    fresh: int

    @property
    def repeated(self) -> int:
        return len(self.samples) - self.fresh


class SampleFeed:
    """A cursor over ranges. A feed without ranges is empty: its node does not train."""

    def __init__(self, ranges: Sequence[SampleRange] = (), skip: int = 0) -> None:
        if any(end < start or start < 0 for start, end in ranges):
            raise ValueError("a range ends before it starts")
        self._all = tuple((start, end) for start, end in ranges if end > start)
        self._left = drop_samples(self._all, skip)
        self._dry = not self._left

    @property
    def empty(self) -> bool:
        """Whether there is nothing to train, not even again."""
        return not self._all

    def take(self, count: int) -> SampleNumbers:
        """The next `count` samples. Must not be called on an empty feed."""
        samples: list[int] = []
        fresh = 0
        while len(samples) < count:
            if not self._left:
                self._dry = True
                self._left = self._all
            start, end = self._left[0]
            stop = min(end, start + count - len(samples))
            samples.extend(range(start, stop))
            fresh += 0 if self._dry else stop - start
            self._left = ((stop, end), *self._left[1:]) if stop < end else self._left[1:]
        return SampleNumbers(tuple(samples), fresh)
