"""Fragments: consecutive layers that one round averages together. Pure.

Rounds rotate over the fragments: round 1 averages the first fragment, round 2 the second, and so on. This spreads the
bytes of the model evenly over time and makes each exchange short, so that the average is less stale when it arrives
(Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512, section 2.1). A layer keeps its anchor, momentum and
digests between two rounds of its fragment.

If nodes hold spans, no fragment crosses a boundary between spans. So a node holds all of a fragment or nothing of it:
its holders average it, and all other members are witnesses of that round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


@dataclass(frozen=True)
class Fragment:
    """Layers [first_layer, end_layer), which are the elements [start, end) of the flat vector."""

    index: int
    first_layer: int
    end_layer: int
    start: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.end - self.start

    @property
    def layers(self) -> range:
        """Layer indices."""
        return range(self.first_layer, self.end_layer)


def fragment_count(wanted: int, layers: int, cuts: int = 0) -> int:
    """Return the number of fragments: at least `wanted` and one per side of each of `cuts` cuts; at most the layers."""
    return min(max(wanted, cuts + 1), layers)


def fragment_of_round(number: int, count: int) -> int:
    """Return the index of the fragment that round `number` averages. Genesis (0) covers all layers and returns 0."""
    return max(0, number - 1) % count


@lru_cache(maxsize=16)
def split_into_fragments(offsets: tuple[int, ...], wanted: int, cuts: tuple[int, ...] = ()) -> tuple[Fragment, ...]:
    """Split the layers into fragments of about equal size.

    `offsets` are the layers' element offsets and the end (layers + 1 entries). No fragment contains layers from both
    sides of one of the `cuts` (first layers of spans, ordered). The split minimises the largest fragment, then the
    sum of squared sizes. The result depends on the arguments only.
    """
    count = fragment_count(wanted, len(offsets) - 1, len(cuts))
    ends = _ends(offsets, count, cuts)
    return tuple(
        Fragment(index, first, end, offsets[first], offsets[end])
        for index, (first, end) in enumerate(pairwise((0, *ends)))
    )


def _ends(offsets: Sequence[int], count: int, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Minimise the sum of squares with a bound on the largest fragment: dynamic programming (fragments × layers)."""
    layers, largest = len(offsets) - 1, _smallest_largest_size(offsets, count, cuts)
    first_allowed = _earliest_starts(offsets, largest, cuts)
    best: list[int | None] = [0, *[None] * layers]  # minimum cost by number of layers
    before: list[list[int]] = []  # by number of fragments and layers: first layer of the last fragment
    for _ in range(count):
        ways: list[tuple[int, int] | None] = [None] * (layers + 1)
        for end in range(1, layers + 1):
            found = (
                (cost + (offsets[end] - offsets[first]) ** 2, first)
                for first in range(first_allowed[end], end)
                if (cost := best[first]) is not None
            )
            ways[end] = min(found, default=None)
        best = [way and way[0] for way in ways]
        before.append([way[1] if way else 0 for way in ways])
    ends = [layers]
    for firsts in reversed(before):
        ends.append(firsts[ends[-1]])
    return tuple(reversed(ends[:-1]))


def _smallest_largest_size(offsets: Sequence[int], count: int, cuts: tuple[int, ...]) -> int:
    """Return the smallest possible size of the largest fragment, by binary search."""
    low, high = 0, offsets[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fragments_needed(offsets, middle, cuts) <= count else (middle + 1, high)
    return low


def _fragments_needed(offsets: Sequence[int], largest: int, cuts: tuple[int, ...]) -> int:
    """Return how many fragments of at most `largest` elements are needed; more than the layers if it is impossible."""
    first_allowed = _earliest_starts(offsets, largest, cuts)
    end, taken = len(offsets) - 1, 0
    while end > 0:
        if first_allowed[end] == end:
            return len(offsets)
        end, taken = first_allowed[end], taken + 1
    return taken


def _earliest_starts(offsets: Sequence[int], largest: int, cuts: tuple[int, ...]) -> list[int]:
    """Return, for every end, the lowest first layer of a fragment that ends there."""
    allowed, first = [0], 0
    for end in range(1, len(offsets)):
        if end - 1 in cuts:
            first = max(first, end - 1)
        while offsets[end] - offsets[first] > largest:
            first += 1
        allowed.append(first)
    return allowed
