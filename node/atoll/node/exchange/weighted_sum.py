"""The average of one part: contributions judged, summed in the order of the members, encoded once. Pure.

Contributions stay encoded until here and are decoded a piece at a time, twice where they are judged: once for their
inner products, once for the sum. All of a piece stays in the processor's cache, so that costs less than to fetch
decoded parts from memory, and decoded parts of all members are never held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from atoll.core.errors import PartInvalid
from atoll.node.averaging.outer import RunningSum, shares_of
from atoll.node.exchange.codecs import PIECE, Codec, Encoded
from atoll.node.exchange.screening import InnerProducts, Screen, judge

Source = Callable[[int, Tensor], None]
"""Writes one contributor's values from an element on, at a whole piece, into fp32 [C]."""

_CACHED_ELEMENTS = 2**19  # of all contributors
_LEAST_PIECE = 2**14  # elements: fewer cost more in calls than they save in fetches


def plain(values_E: Tensor) -> Source:
    """Values that are not encoded."""
    return partial(_copy, values_E)


def _copy(values_E: Tensor, first: int, values_C: Tensor) -> None:
    values_C.copy_(values_E[first : first + len(values_C)])


def factors_of(sources: Sequence[Source], work: Sequence[int], elements: int, screen: Screen) -> tuple[float, ...]:
    """What of each contribution enters the sum (`screening.judge`)."""
    piece = min(_piece(len(sources)), elements)
    products, value_C = InnerProducts(len(sources), piece), torch.empty(piece)
    for first in range(0, elements, piece):
        products.add(_decoded(sources, first, value_C[: elements - first]))
    return judge(products.sums(), work, elements, screen)


def _decoded(sources: Iterable[Source], first: int, value_C: Tensor) -> Iterator[Tensor]:
    """One after another, in the same memory."""
    for source in sources:
        source(first, value_C)
        yield value_C


def encoded_mean(
    codec: Codec, sources: Sequence[Source], weights: Sequence[int], factors: Sequence[float], elements: int
) -> memoryview:
    """The bytes of Σ wᵢ·fᵢ·xᵢ / Σ wᵢ. Raises `PartInvalid` if that is not finite, or nobody is in it."""
    counted = [(source, share) for source, share in zip(sources, shares_of(weights, factors), strict=True) if share > 0]
    if not counted:
        raise PartInvalid("nobody is in this sum")
    encoded, scratch = Encoded(codec, elements), torch.empty(3, min(PIECE, elements))
    for first in range(0, elements, PIECE):
        value_C, sum_C, product_C = scratch[:, : elements - first]
        mean = RunningSum(sum_C, product_C)
        for source, share in counted:
            source(first, value_C)
            mean.add(value_C, share)
        encoded.put(first, mean.sum_C)
    return encoded.body()


def _piece(count: int) -> int:
    """Elements of each contributor at a time."""
    return int(min(PIECE, max(_LEAST_PIECE, 2 ** ((_CACHED_ELEMENTS // count).bit_length() - 1))))
