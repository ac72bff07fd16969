"""Who reduces what: the flat vector cut among reducers, and each reducer's range cut into parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

BLOCK = 128  # of the block codecs; ranges start on whole blocks


@dataclass(frozen=True)
class ReduceRange:
    """The elements [start, end) that `reducer` sums."""

    reducer: str
    start: int
    end: int


@dataclass(frozen=True)
class Part:
    """Elements [start, end) of the flat vector: what one frame carries."""

    index: int  # within the reducer's range
    start: int
    end: int

    @property
    def elements(self) -> int:
        """Decoded length."""
        return self.end - self.start


@dataclass(frozen=True)
class Share:
    """The parts that one reducer sums; its part i is part `first` + i in the order of the vector."""

    reducer: str
    first: int
    parts: tuple[Part, ...]


def partition(elements: int, members: Sequence[str], bandwidth: Mapping[str, int]) -> tuple[ReduceRange, ...]:
    """Cut [0, elements) among `members` in their order, in proportion to `bandwidth` (bytes per second).

    Whole blocks; a member of bandwidth 0 reduces nothing; when all are 0 the work is shared equally. Ranges
    are contiguous, cover everything once, and follow from the arguments alone (integers only), so every
    member computes the same.
    """
    weights = [max(0, bandwidth.get(peer, 0)) for peer in members]
    if not any(weights):
        weights = [1] * len(members)
    blocks = -(-elements // BLOCK)
    total = sum(weights)
    ranges = []
    start = passed = 0
    for peer, weight in zip(members, weights, strict=True):
        passed += weight
        end = min(elements, (blocks * passed // total) * BLOCK)
        ranges.append(ReduceRange(peer, start, end))
        start = end
    return tuple(ranges)


def parts(piece: ReduceRange, part_elements: int) -> tuple[Part, ...]:
    """Cut one reducer's range into parts of `part_elements` (the last may be shorter)."""
    starts = range(piece.start, piece.end, part_elements)
    return tuple(Part(i, start, min(start + part_elements, piece.end)) for i, start in enumerate(starts))


def shares(ranges: Iterable[ReduceRange], part_elements: int) -> tuple[Share, ...]:
    """Every reducer's parts, numbered through the vector; reducers of nothing are left out."""
    found: list[Share] = []
    first = 0
    for piece in ranges:
        cut = parts(piece, part_elements)
        if cut:
            found.append(Share(piece.reducer, first, cut))
        first += len(cut)
    return tuple(found)
