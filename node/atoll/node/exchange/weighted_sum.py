"""The average of one part: screen contributions, sum them in the order of the members, encode the mean once. Pure.

Contributions stay encoded until here and are decoded in pieces: once for the sum, and before that once for the inner
products if they are screened. A piece of all members fits into the processor's cache. So decoding twice costs less time
than reading decoded parts from memory, and the decoded parts of all members never take up memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from atoll.core.errors import PartInvalid
from atoll.core.probation import limit_weights
from atoll.node.exchange.codecs import PIECE_ELEMENTS, Codec, PartEncoder
from atoll.node.exchange.screening import InnerProducts, Screen, factors_from_products
from atoll.v1 import dataplane_pb2 as dp

PieceSource = Callable[[int, Tensor], None]
"""Writes one contributor's values into fp32 [C], beginning with the given element, the start of a piece."""

_CACHED_ELEMENTS = 2**19  # of all contributors together
_MIN_PIECE_ELEMENTS = 2**14  # shorter pieces cost more in calls than they save in memory reads


@dataclass(frozen=True)
class SumRules:
    """The rules that every sum of an exchange follows."""

    weights: Mapping[str, int]  # of each contribution, in the order of the sum
    tokens: Mapping[str, int]  # by which screening judges its size
    on_probation: frozenset[str]  # contributors that do not decide how others are screened
    screen: Screen | None  # None: contributions are not screened

    @classmethod
    def of(cls, start: dp.Start, screen: Screen | None) -> SumRules:
        """The rules of the exchange that `start` describes."""
        made = start.contributions
        on_probation = frozenset(item.peer_id for item in made if item.on_probation)
        tokens = {item.peer_id: item.judged_tokens if item.on_probation else item.weight for item in made}
        return cls({item.peer_id: item.weight for item in made}, tokens, on_probation, screen)


def weights_in_sum(weights: Sequence[int], factors: Sequence[float], on_probation: Sequence[bool]) -> list[int]:
    """Weights of the contributions in one sum; 0 for a contribution that is left out.

    All members on probation together weigh at most a third of the other members in this sum.
    """
    there = [weight if factor > 0 else 0 for weight, factor in zip(weights, factors, strict=True)]
    return limit_weights(there, on_probation) if any(on_probation) else there


def tensor_source(values_E: Tensor) -> PieceSource:
    """A source of values that are not encoded."""
    return partial(_copy, values_E)


def _copy(values_E: Tensor, first: int, values_C: Tensor) -> None:
    values_C.copy_(values_E[first : first + len(values_C)])


def screening_factors(
    sources: Sequence[PieceSource],
    tokens: Sequence[int],
    elements: int,
    screen: Screen,
    on_probation: Sequence[bool] = (),
) -> tuple[float, ...]:
    """Screen the contributions; returns the factor of each in the sum (`screening.factors_from_products`)."""
    piece = min(_piece_elements(len(sources)), elements)
    products, value_C = InnerProducts(len(sources), piece), torch.empty(piece)
    for first in range(0, elements, piece):
        products.add(_decode_each(sources, first, value_C[: elements - first]))
    return factors_from_products(products.sums(), tokens, elements, screen, on_probation)


def _decode_each(sources: Iterable[PieceSource], first: int, value_C: Tensor) -> Iterator[Tensor]:
    """Decode the piece of each source into the same memory, one after another."""
    for source in sources:
        source(first, value_C)
        yield value_C


def encoded_mean(
    codec: Codec, sources: Sequence[PieceSource], weights: Sequence[int], factors: Sequence[float], elements: int
) -> memoryview:
    """Encode Σ wᵢ·fᵢ·xᵢ / Σ wᵢ. Raises `PartInvalid` if it is not finite or no contribution counts."""
    counted = [
        (source, share) for source, share in zip(sources, mean_coefficients(weights, factors), strict=True) if share > 0
    ]
    if not counted:
        raise PartInvalid("no contribution to this part counts: all were left out or have weight 0")
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
    """The length of a piece for screening `count` contributors."""
    return int(min(PIECE_ELEMENTS, max(_MIN_PIECE_ELEMENTS, 2 ** ((_CACHED_ELEMENTS // count).bit_length() - 1))))


def mean_coefficients(weights: Sequence[int], factors: Sequence[float]) -> tuple[float, ...]:
    """The coefficients wᵢ·fᵢ / Σ wᵢ of a mean. A contribution with weight or factor 0 gets 0 and is not in Σ wᵢ."""
    counts = [weight > 0 and factor > 0 for weight, factor in zip(weights, factors, strict=True)]
    total = float(sum(weight for weight, counted in zip(weights, counts, strict=True) if counted))
    return tuple(
        float(weight) / total * factor if counted else 0.0
        for weight, factor, counted in zip(weights, factors, counts, strict=True)
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int], factors: Sequence[float] = ()) -> Tensor:
    """Σ wᵢ·fᵢ·xᵢ / Σ wᵢ in the given order, fp32, on the host. At least one contribution must count."""
    mean = RunningSum(torch.empty_like(values[0]), torch.empty_like(values[0]))
    for value, share in zip(values, mean_coefficients(weights, factors or (1.0,) * len(values)), strict=True):
        if share > 0:
            mean.add(value, share)
    return mean.sum_C


class RunningSum:
    """Σ sᵢ·xᵢ in the order of the calls; each product and each sum is rounded to fp32 on its own."""

    def __init__(self, sum_C: Tensor, product_C: Tensor) -> None:
        """Use the caller's memory; its contents are overwritten."""
        self.sum_C = sum_C
        self._product_C = product_C
        self._empty = True

    def add(self, value_C: Tensor, share: float) -> None:
        """Add `share` times `value_C`."""
        if self._empty:
            torch.mul(value_C, share, out=self.sum_C)
        else:
            torch.add(self.sum_C, torch.mul(value_C, share, out=self._product_C), out=self.sum_C)
        self._empty = False
