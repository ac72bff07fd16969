"""Feed of the samples that a node trains next: a list of half-open ranges, consumed in order. Pure.

A manifest lists the ranges that a node had not consumed as of its snapshot. What the node trained between the snapshot
and the manifest came from the start of those ranges, so a new list begins with a `skip`. If the ranges are used up
before the next manifest, the feed reads the last list again and counts its samples as repeated: training never stops
for lack of a manifest. Repeated samples are not consumption. The run's data position (`core/data_position.py`) moves by
fresh samples only, so no node's samples are skipped.
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
            raise ValueError(f"a sample range needs 0 <= start <= end: {list(ranges)}")
        self._all = tuple((start, end) for start, end in ranges if end > start)
        self._left = drop_samples(self._all, skip)
        self._dry = not self._left

    @property
    def empty(self) -> bool:
        """True if there is nothing to train, not even repeated samples."""
        return not self._all

    @property
    def upcoming(self) -> tuple[SampleRange, ...]:
        """Ranges that no step has taken yet."""
        return self._left

    def take(self, count: int) -> SampleNumbers:
        """Return the next `count` samples. The feed must not be empty."""
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
