"""Partition the flat vector among reducers, and each reducer's range into parts. Pure.

Parts make the steps of an exchange overlap: while one part is sent, an earlier one is summed and a third returns. Many
small parts overlap best but cost most: each needs a frame, a digest, a verdict and some turns of the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

BLOCK_ELEMENTS = 128  # of the block codecs; ranges and parts begin on whole blocks
MIN_PART_ELEMENTS = 2**17  # smaller parts cost more than their overlap saves
MAX_PART_BYTES = 512 * 1024  # encoded
_MIN_PARTS = 16  # in the longest range, unless they would be shorter than `MIN_PART_ELEMENTS`


@dataclass(frozen=True)
class ReduceRange:
    """The elements [start, end) that `reducer` sums."""

    reducer: str
    start: int
    end: int


@dataclass(frozen=True)
class Part:
    """Elements [start, end) of the flat vector: the contents of one frame."""

    index: int  # within the reducer's range
    start: int
    end: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return self.end - self.start


@dataclass(frozen=True)
class ReducerShare:
    """The parts that one reducer sums. Its part i has index `first` + i in the order of the vector."""

    reducer: str
    first: int
    parts: tuple[Part, ...]


def partition(elements: int, members: Sequence[str], bandwidth: Mapping[str, int]) -> tuple[ReduceRange, ...]:
    """Divide [0, elements) among `members` in their order, in proportion to `bandwidth` (bytes per second).

    Ranges are contiguous, consist of whole blocks and cover every element once. A member with bandwidth 0 gets an empty
    range; when all have 0, ranges are equal. The arithmetic uses integers only, so every member computes the same.
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
    """Choose the length of parts: whole blocks, at most `most` elements (a multiple of `BLOCK_ELEMENTS`)."""
    longest = max(piece.end - piece.start for piece in ranges)
    fit = MAX_PART_BYTES // encoded_bytes(BLOCK_ELEMENTS)
    wanted = max(MIN_PART_ELEMENTS // BLOCK_ELEMENTS, -(-longest // (_MIN_PARTS * BLOCK_ELEMENTS)))
    return min(most, BLOCK_ELEMENTS * min(fit, wanted))


def parts(piece: ReduceRange, part_elements: int) -> tuple[Part, ...]:
    """Divide one reducer's range into parts of `part_elements`; the last may be shorter."""
    starts = range(piece.start, piece.end, part_elements)
    return tuple(Part(i, start, min(start + part_elements, piece.end)) for i, start in enumerate(starts))


def reducer_shares(ranges: Iterable[ReduceRange], part_elements: int) -> tuple[ReducerShare, ...]:
    """Every reducer's parts, numbered in the order of the vector. Omits reducers with an empty range."""
    found: list[ReducerShare] = []
    first = 0
    for piece in ranges:
        cut = parts(piece, part_elements)
        if cut:
            found.append(ReducerShare(piece.reducer, first, cut))
        first += len(cut)
    return tuple(found)
