"""Who reduces what: the flat vector cut among reducers, and each reducer's range cut into parts. Pure.

Parts are what overlaps: while one is sent, the one before is summed and the one before that comes back. Many small ones
overlap best and cost most: each is a frame, a digest, a verdict and some turns of the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

BLOCK_ELEMENTS = 128  # of the block codecs; ranges start on whole blocks
MIN_PART_ELEMENTS = 2**17  # elements; smaller ones cost more than they overlap
MAX_PART_BYTES = 512 * 1024  # as encoded
_PARTS = 16  # of the longest range, at least, where that leaves them large enough


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
class ReducerShare:
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
    blocks = -(-elements // BLOCK_ELEMENTS)
    total = sum(weights)
    ranges = []
    start = passed = 0
    for peer, weight in zip(members, weights, strict=True):
        passed += weight
        end = min(elements, (blocks * passed // total) * BLOCK_ELEMENTS)
        ranges.append(ReduceRange(peer, start, end))
        start = end
    return tuple(ranges)


def part_elements(ranges: Iterable[ReduceRange], encoded_bytes: Callable[[int], int], most: int) -> int:
    """How long parts are: whole blocks, `most` elements at most (a multiple of `BLOCK_ELEMENTS`, like the result)."""
    longest = max(piece.end - piece.start for piece in ranges)
    fit = MAX_PART_BYTES // encoded_bytes(BLOCK_ELEMENTS)
    wanted = max(MIN_PART_ELEMENTS // BLOCK_ELEMENTS, -(-longest // (_PARTS * BLOCK_ELEMENTS)))
    return min(most, BLOCK_ELEMENTS * min(fit, wanted))


def parts(piece: ReduceRange, part_elements: int) -> tuple[Part, ...]:
    """Cut one reducer's range into parts of `part_elements` (the last may be shorter)."""
    starts = range(piece.start, piece.end, part_elements)
    return tuple(Part(i, start, min(start + part_elements, piece.end)) for i, start in enumerate(starts))


def reducer_shares(ranges: Iterable[ReduceRange], part_elements: int) -> tuple[ReducerShare, ...]:
    """Every reducer's parts, numbered through the vector; reducers of nothing are left out."""
    found: list[ReducerShare] = []
    first = 0
    for piece in ranges:
        cut = parts(piece, part_elements)
        if cut:
            found.append(ReducerShare(piece.reducer, first, cut))
        first += len(cut)
    return tuple(found)
