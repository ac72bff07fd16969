"""Fragments: consecutive layers that are averaged together, a different one in every round. Pure.

Rounds take turns: round 1 averages the first fragment, round 2 the second, and so on. So the bytes of a whole model are
spread evenly over the time in which they are due, and an exchange is short beside it: what comes back is less old
(Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512, section 2.1). A layer keeps its anchor, momentum and digests
from the last round of its fragment until the next.

Where nodes hold spans, a fragment lies between their cuts, so that a node holds all of it or nothing: it is averaged
among its holders, and the others are witnesses of its round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


@dataclass(frozen=True)
class Fragment:
    """Layers [first_layer, end_layer): the elements [start, end) of the flat vector."""

    index: int
    first_layer: int
    end_layer: int
    start: int
    end: int

    @property
    def elements(self) -> int:
        """How many there are."""
        return self.end - self.start

    @property
    def layers(self) -> range:
        """Their numbers."""
        return range(self.first_layer, self.end_layer)


def fragment_count(wanted: int, layers: int, cuts: int = 0) -> int:
    """How many fragments a model of so many layers is cut into: a layer is never cut, and `cuts` always are."""
    return min(max(wanted, cuts + 1), layers)


def fragment_of_round(number: int, count: int) -> int:
    """The index of the fragment that round `number` averages; genesis, number 0, is of all and counts as the first."""
    return max(0, number - 1) % count


@lru_cache(maxsize=16)
def split_into_fragments(offsets: tuple[int, ...], wanted: int, cuts: tuple[int, ...] = ()) -> tuple[Fragment, ...]:
    """Cut the layers between `offsets` (one entry more than there are layers) into fragments of about equal size.

    No fragment holds layers from both sides of one of the `cuts` (first layers of spans, ordered). The largest is as
    small as can be, and the others are as equal as that allows: of all such cuts with that largest fragment, the sum of
    the squared sizes is least. It follows from the arguments alone.
    """
    count = fragment_count(wanted, len(offsets) - 1, len(cuts))
    ends = _ends(offsets, count, cuts)
    return tuple(
        Fragment(index, first, end, offsets[first], offsets[end])
        for index, (first, end) in enumerate(pairwise((0, *ends)))
    )


def _ends(offsets: Sequence[int], count: int, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """By dynamic programming over (fragments, layers) for the sum of squares, none larger than it has to be."""
    layers, largest = len(offsets) - 1, _smallest_largest_size(offsets, count, cuts)
    first_allowed = _earliest_starts(offsets, largest, cuts)
    best: list[int | None] = [0, *[None] * layers]  # the least cost of so many layers
    before: list[list[int]] = []  # for every number of fragments and layers: where the last fragment begins
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
    """The size of the largest fragment where it is as small as can be: found by halving."""
    low, high = 0, offsets[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fragments_needed(offsets, middle, cuts) <= count else (middle + 1, high)
    return low


def _fragments_needed(offsets: Sequence[int], largest: int, cuts: tuple[int, ...]) -> int:
    """How many fragments it takes when none is larger than that; more than there are layers when it cannot be."""
    first_allowed = _earliest_starts(offsets, largest, cuts)
    end, taken = len(offsets) - 1, 0
    while end > 0:
        if first_allowed[end] == end:
            return len(offsets)
        end, taken = first_allowed[end], taken + 1
    return taken


def _earliest_starts(offsets: Sequence[int], largest: int, cuts: tuple[int, ...]) -> list[int]:
    """For every end, the first layer with which a fragment that ends there may begin."""
    allowed, first = [0], 0
    for end in range(1, len(offsets)):
        if end - 1 in cuts:
            first = max(first, end - 1)
        while offsets[end] - offsets[first] > largest:
            first += 1
        allowed.append(first)
    return allowed
