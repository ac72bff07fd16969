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


def turn_of(number: int, count: int) -> int:
    """The index of the fragment that round `number` averages; genesis, number 0, is of all and counts as the first."""
    return max(0, number - 1) % count


@lru_cache(maxsize=16)
def cut_layers(offsets: tuple[int, ...], wanted: int, cuts: tuple[int, ...] = ()) -> tuple[Fragment, ...]:
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
    """By dynamic programming over (fragments, layers) for the pair (largest, sum of squares), the lesser the better."""
    layers = len(offsets) - 1
    best: list[tuple[int, int, tuple[int, ...]] | None] = [(0, 0, ()), *[None] * layers]
    for number in range(1, count + 1):
        best = [None, *(_best_end(offsets, best, end, cuts) for end in range(1, layers + 1))]
        best[:number] = [None] * number  # each fragment has a layer
    found = best[layers]
    assert found is not None
    return found[2]


def _best_end(
    offsets: Sequence[int],
    before: Sequence[tuple[int, int, tuple[int, ...]] | None],
    end: int,
    cuts: tuple[int, ...],
) -> tuple[int, int, tuple[int, ...]] | None:
    """The best cut of the first `end` layers that adds one fragment to a cut `before`."""
    first_allowed = max((cut for cut in cuts if cut < end), default=0)
    ways = (
        (max(cut[0], size), cut[1] + size * size, (*cut[2], end))
        for first in range(first_allowed, end)
        if (cut := before[first]) is not None
        for size in [offsets[end] - offsets[first]]
    )
    return min(ways, default=None)
