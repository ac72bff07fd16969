"""The average of one part: contributions judged, summed in the order of the members, encoded once. Pure.

Contributions stay encoded until here and are decoded a piece at a time, twice where they are judged: once for their
inner products, once for the sum. All of a piece stays in the processor's cache, so that costs less than to fetch
decoded parts from memory, and decoded parts of all members are never held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from atoll.core.errors import PartInvalid
from atoll.node.exchange.codecs import PIECE_ELEMENTS, Codec, PartEncoder
from atoll.node.exchange.screening import InnerProducts, Screen, factors_from_products

PieceSource = Callable[[int, Tensor], None]
"""Writes one contributor's values from an element on, at a whole piece, into fp32 [C]."""

_CACHED_ELEMENTS = 2**19  # of all contributors
_MIN_PIECE_ELEMENTS = 2**14  # elements: fewer cost more in calls than they save in fetches


def tensor_source(values_E: Tensor) -> PieceSource:
    """Values that are not encoded."""
    return partial(_copy, values_E)


def _copy(values_E: Tensor, first: int, values_C: Tensor) -> None:
    values_C.copy_(values_E[first : first + len(values_C)])


def screening_factors(
    sources: Sequence[PieceSource], tokens: Sequence[int], elements: int, screen: Screen
) -> tuple[float, ...]:
    """What of each contribution enters the sum (`screening.factors_from_products`)."""
    piece = min(_piece_elements(len(sources)), elements)
    products, value_C = InnerProducts(len(sources), piece), torch.empty(piece)
    for first in range(0, elements, piece):
        products.add(_decoded(sources, first, value_C[: elements - first]))
    return factors_from_products(products.sums(), tokens, elements, screen)


def _decoded(sources: Iterable[PieceSource], first: int, value_C: Tensor) -> Iterator[Tensor]:
    """One after another, in the same memory."""
    for source in sources:
        source(first, value_C)
        yield value_C


def encoded_mean(
    codec: Codec, sources: Sequence[PieceSource], weights: Sequence[int], factors: Sequence[float], elements: int
) -> memoryview:
    """The bytes of Σ wᵢ·fᵢ·xᵢ / Σ wᵢ. Raises `PartInvalid` if that is not finite, or nobody is in it."""
    counted = [
        (source, share) for source, share in zip(sources, mean_coefficients(weights, factors), strict=True) if share > 0
    ]
    if not counted:
        raise PartInvalid("nobody is in this sum")
    encoded, scratch = PartEncoder(codec, elements), torch.empty(3, min(PIECE_ELEMENTS, elements))
    for first in range(0, elements, PIECE_ELEMENTS):
        value_C, sum_C, product_C = scratch[:, : elements - first]
        mean = RunningSum(sum_C, product_C)
        for source, share in counted:
            source(first, value_C)
            mean.add(value_C, share)
        encoded.put(first, mean.sum_C)
    return encoded.body()


def _piece_elements(count: int) -> int:
    """Elements of each contributor at a time."""
    return int(min(PIECE_ELEMENTS, max(_MIN_PIECE_ELEMENTS, 2 ** ((_CACHED_ELEMENTS // count).bit_length() - 1))))


def token_weight(tokens: int) -> int:
    """A contribution weighs what was trained for it."""
    return tokens


def sqrt_token_weight(tokens: int) -> int:
    """It weighs the square root of that, in 1/1024: the noise of gradients falls with more steps, their drift grows.

    Integers, so that all machines agree; 0 for nothing.
    """
    return math.isqrt(tokens << 20)


WEIGHTINGS = {"tokens": token_weight, "roots": sqrt_token_weight}


def mean_coefficients(weights: Sequence[int], factors: Sequence[float]) -> tuple[float, ...]:
    """wᵢ·fᵢ / Σ wᵢ of each member in a mean; members of weight or factor 0 have 0, and are in neither sum."""
    counts = [weight > 0 and factor > 0 for weight, factor in zip(weights, factors, strict=True)]
    total = float(sum(weight for weight, there in zip(weights, counts, strict=True) if there))
    return tuple(
        float(weight) / total * factor if there else 0.0
        for weight, factor, there in zip(weights, factors, counts, strict=True)
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int], factors: Sequence[float] = ()) -> Tensor:
    """Σ wᵢ·fᵢ·xᵢ / Σ wᵢ in the order given, fp32, on the host; at least one must count."""
    mean = RunningSum(torch.empty_like(values[0]), torch.empty_like(values[0]))
    for value, share in zip(values, mean_coefficients(weights, factors or (1.0,) * len(values)), strict=True):
        if share > 0:
            mean.add(value, share)
    return mean.sum_C


class RunningSum:
    """Σ sᵢ·xᵢ in the order in which they come, each product and each sum rounded to fp32 on its own."""

    def __init__(self, sum_C: Tensor, product_C: Tensor) -> None:
        """In memory of the caller's; what is in it does not count."""
        self.sum_C = sum_C
        self._product_C = product_C
        self._empty = True

    def add(self, value_C: Tensor, share: float) -> None:
        """One more."""
        if self._empty:
            torch.mul(value_C, share, out=self.sum_C)
        else:
            torch.add(self.sum_C, torch.mul(value_C, share, out=self._product_C), out=self.sum_C)
        self._empty = False
