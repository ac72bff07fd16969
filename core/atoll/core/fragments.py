"""Fragments: consecutive layers that are averaged together, a different one in every round. Pure.

Rounds take turns: round 1 averages the first fragment, round 2 the second, and so on. So the bytes of a whole model are
spread evenly over the time in which they are due, and an exchange is short beside it: what comes back is less old
(Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512, section 2.1). A layer keeps its anchor, momentum and digests
from the last round of its fragment until the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


def fragment_count(wanted: int, layers: int) -> int:
    """How many fragments a model of so many layers is cut into: a layer is never cut."""
    return min(wanted, layers)


def turn_of(number: int, count: int) -> int:
    """The index of the fragment that round `number` averages; genesis, number 0, is of all and counts as the first."""
    return max(0, number - 1) % count


def cut_layers(offsets: Sequence[int], wanted: int) -> tuple[Fragment, ...]:
    """Cut the layers between `offsets` (one entry more than there are layers) so that the largest fragment is smallest.

    Of several such cuts the one with the longest first fragments; it follows from the arguments alone.
    """
    count = fragment_count(wanted, len(offsets) - 1)
    ends = _ends(offsets, count, _least_cap(offsets, count))
    return tuple(
        Fragment(index, first, end, offsets[first], offsets[end])
        for index, (first, end) in enumerate(pairwise([0, *ends]))
    )


def _least_cap(offsets: Sequence[int], count: int) -> int:
    """The least number of elements such that `count` fragments of at most that many hold everything."""
    sizes = [end - start for start, end in pairwise(offsets)]
    low, high = max(sizes), offsets[-1] - offsets[0]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(sizes, count, middle) else (middle + 1, high)
    return low


def _fits(sizes: Sequence[int], count: int, cap: int) -> bool:
    used, fragments = 0, 1
    for size in sizes:
        if used + size > cap:
            used, fragments = 0, fragments + 1
        used += size
    return fragments <= count


def _ends(offsets: Sequence[int], count: int, cap: int) -> list[int]:
    """Where each fragment ends, filled up in order; every one of the rest keeps a layer."""
    layers = len(offsets) - 1
    ends: list[int] = []
    first = 0
    for left in reversed(range(count)):  # fragments after this one
        end = first + 1
        while end < layers - left and offsets[end + 1] - offsets[first] <= cap:
            end += 1
        ends.append(end)
        first = end
    return ends
