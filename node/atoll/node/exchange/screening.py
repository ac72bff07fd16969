"""Which contributions to a part look like training, and how much of each enters its sum. Pure.

A reducer judges each part from the inner products of what the members sent, and from nothing else:

- *Size.* A pseudo-gradient grows with the work in it, about as tokens^¾ (measured; between the root, when steps are
  noise, and tokens, when they all agree). What is more than twice the usual size for its tokens is scaled down to that.
  And no more than twice what the optimiser can move in so many steps: that holds for one contribution, too, and where
  most are zero. What has less than a quarter of the usual size would only thin the sum out, and is left out.
- *Direction.* Of everybody's cosines to the others, the median counts: fewer than half can neither raise their own nor
  lower an honest one below the others' lowest. It is compared with the usual one, which those others have among
  themselves. Noise has 0 of that, a flipped sign less. Who has the lowest share, below 0.3, is left out, and the rest
  are judged again. Less work means more noise: the bar sinks with the square root of the tokens.

Fewer than half can be left out, for their direction before for their size. Directions are not judged where fewer than
three contribute, or where the usual cosine is no more than chance: then there is nothing to agree with. A zero vector
has none, and where half are zero, nobody is too small: rows of tokens that a member did not see are zero. What a lie
inside the spread of the honest can do (Baruch et al. 2019, arXiv:1902.06156), it still can. Measured in docs/adr/0004.

Only the reducer of a part judges it. Inner products are sums in fp64, in whatever order its BLAS is fastest; factors
are rounded to so few bits that simulations agree with real processes, but for who stands exactly at a bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NORM_RATIO = 2.0  # of the usual norm, and of what the optimiser can do: more is scaled down to it
MIN_NORM_RATIO = 0.25  # of the usual norm: less is left out
NORM_EXPONENTS = (0.5, 0.75, 1.0)  # of tokens in a norm: at least, usually, at most
MIN_COSINE_RATIO = 0.3  # of the usual cosine: less is left out
CHANCE_COSINE_SIGMAS = 4.0  # standard deviations of the cosine of unrelated vectors
MIN_CONTRIBUTIONS = 3  # contributions, at least

_CHUNK = 2**15  # elements that whole vectors are multiplied by at a time
_FACTOR_BITS = 20  # that count of a factor; sums of fp64 differ in the last of their 53


@dataclass(frozen=True)
class Screen:
    """What a run and its plan say about honest contributions."""

    max_change_per_token: float  # the most by which the optimiser moves one element while it trains one token
    least: float = MIN_NORM_RATIO  # of the usual norm; 0 where a step takes more tokens for some than for others


class InnerProducts:
    """Of every two of n fp32 vectors that come piece by piece, in fp64: there products of fp32 numbers are exact."""

    def __init__(self, count: int, longest: int) -> None:
        """`longest`: elements of a piece, at most."""
        self._wide_nC = torch.empty(count, longest, dtype=torch.float64)
        self._upper_nn = torch.zeros(count, count, dtype=torch.float64)  # and the diagonal
        self._rows = [self._upper_nn[row, row:] for row in range(count)]

    def add(self, pieces: Iterable[Tensor]) -> None:
        """The next elements of all, [C] each; one may be overwritten when the next is asked for."""
        elements = 0
        for row_C, piece_C in zip(self._wide_nC, pieces, strict=True):
            elements = piece_C.numel()
            row_C[:elements] = piece_C
        wide_nC = self._wide_nC[:, :elements]
        for row, sums_m in enumerate(self._rows):
            torch.addmv(sums_m, wide_nC[row:], wide_nC[row], out=sums_m)

    def sums(self) -> Tensor:
        """fp64 [n, n]."""
        return self._upper_nn + self._upper_nn.triu(1).T


def inner_products(values: Sequence[Tensor]) -> Tensor:
    """Of every two fp32 tensors [E]: fp64 [n, n]."""
    elements = values[0].numel()
    products = InnerProducts(len(values), min(_CHUNK, elements))
    for first in range(0, elements, _CHUNK):
        products.add(value_E[first : first + _CHUNK] for value_E in values)
    return products.sums()


def factors_from_products(
    products_nn: Tensor, tokens: Sequence[int], elements: int, screen: Screen
) -> tuple[float, ...]:
    """What of each contribution enters the sum: 0 nothing of it, 1 all, between them the factor that scales it down.

    `products_nn` are their inner products, `tokens` their tokens (positive), `elements` the length of the part.
    """
    tokens_n = torch.tensor(tokens, dtype=torch.float64)
    norms_n = products_nn.diagonal().sqrt()
    factors_n = (
        (_limits(norms_n, tokens_n, elements, screen.max_change_per_token) / norms_n).clamp(max=1.0).nan_to_num(nan=1.0)
    )
    there = norms_n.nonzero().view(-1)
    for _ in range((len(there) - 1) // 2 if len(there) >= MIN_CONTRIBUTIONS else 0):
        worst = _worst(products_nn[there][:, there], tokens_n[there], elements)
        if worst is None:
            break
        factors_n[there[worst]] = 0.0
        there = torch.cat((there[:worst], there[worst + 1 :]))
    small = [index for index in _small(norms_n, tokens_n, screen.least) if factors_n[index] > 0]
    left_out = int((factors_n == 0).sum())
    factors_n[small[: max(0, (len(tokens) - 1) // 2 - left_out)]] = 0.0
    return tuple(_rounded(factor) for factor in factors_n.tolist())


def _limits(norms_n: Tensor, tokens_n: Tensor, elements: int, max_change_per_token: float) -> Tensor:
    """The largest norm that each may have."""
    limits_n = MAX_NORM_RATIO * max_change_per_token * math.sqrt(elements) * tokens_n
    there = norms_n.nonzero().view(-1)
    if len(there) >= MIN_CONTRIBUTIONS:
        least, usually, most = NORM_EXPONENTS
        relative_n = tokens_n / _upper_median(tokens_n[there])
        usual = _upper_median((norms_n / relative_n**usually)[there])
        limits_n = torch.minimum(limits_n, MAX_NORM_RATIO * usual * torch.maximum(relative_n**least, relative_n**most))
    return limits_n


def _small(norms_n: Tensor, tokens_n: Tensor, bar: float) -> list[int]:
    """Who brings too little for its work, the smallest first."""
    if len(norms_n) < MIN_CONTRIBUTIONS:
        return []
    least, usually, most = NORM_EXPONENTS
    relative_n = tokens_n / _upper_median(tokens_n)
    usual = (norms_n / relative_n**usually).median()  # the lower one: fewer than half are below it
    sizes_n = norms_n / (usual * torch.minimum(relative_n**least, relative_n**most))  # NaN where most are zero
    return [index for index in sizes_n.argsort().tolist() if sizes_n[index] < bar]


def _worst(products_nn: Tensor, tokens_n: Tensor, elements: int) -> int | None:
    """Who agrees least with the others, if that is too little."""
    norms_n, count = products_nn.diagonal().sqrt(), len(tokens_n)
    cosines_nn = products_nn / torch.outer(norms_n, norms_n)
    alone_nn = ~torch.eye(count, dtype=torch.bool)
    rest_nm = cosines_nn[alone_nn].view(count, count - 1)  # row j: to everybody else
    sorted_nm, order_nm = rest_nm.sort(dim=1)
    rank_nm = order_nm.argsort(dim=1)
    median_n = sorted_nm[:, (count - 1) // 2]
    # [j, i]: the upper median of row j without its cosine to i, from the ranks in the whole row
    middle = (count - 2) // 2
    without_nm = sorted_nm[:, middle + 1 : middle + 2].where(rank_nm <= middle, sorted_nm[:, middle : middle + 1])
    without_nn = torch.full_like(cosines_nn, math.nan)
    without_nn[alone_nn] = without_nm.flatten()
    usual_n = without_nn.T[alone_nn].view(count, count - 1).median(dim=1).values
    bar_n = (tokens_n / _upper_median(tokens_n)).sqrt().clamp(max=1.0)
    merits_n = (median_n / (usual_n * bar_n)).where(usual_n > CHANCE_COSINE_SIGMAS / math.sqrt(elements), math.inf)
    worst = int(merits_n.argmin())
    return worst if merits_n[worst] < MIN_COSINE_RATIO else None


def _upper_median(values_n: Tensor) -> Tensor:
    """The higher one of the two in the middle, where there are two."""
    return values_n.sort().values[len(values_n) // 2]


def _rounded(factor: float) -> float:
    """To its first bits."""
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(round(math.ldexp(mantissa, _FACTOR_BITS)), exponent - _FACTOR_BITS)
