"""Screen the contributions to a part: decide how much of each enters the sum. Pure.

The reducer of a part screens it, using only the inner products of the contributions:

- *Size.* The norm of a pseudo-gradient grows about as tokens^¾ (measured; the square root if steps are pure noise,
  linear if all steps agree). A contribution with more than twice the usual norm for its tokens is scaled down to that
  bound. A second bound is twice the largest change that the optimiser can make with so many tokens; it applies even to
  a single contribution, and when most are zero. A contribution with less than a quarter of the usual norm would only
  dilute the sum: it is left out.
- *Direction.* The score of a contribution is the median of its cosines to the others. A minority can neither raise its
  own score nor push an honest score below the lowest of the other honest ones. The score is divided by the usual score,
  that of the others among themselves. Noise has the ratio 0, a flipped sign a negative one. The contribution with the
  lowest ratio, if below 0.3, is left out, and the rest are screened again. A contribution with fewer tokens has more
  noise: its threshold shrinks with the square root of its tokens.

Contributions on probation do not influence these comparisons (core/probation.py). Each is compared only with the kept
contributions of other members. So even many of them neither push out an honest member nor protect one another. A norm
above the usual norm is scaled down to it, because many of them together could lengthen every step. Their direction must
agree with the others nearly as much as the others agree among themselves.

Fewer than half of the other contributions can be left out, first for their direction, then for their size. Directions
are not screened when there are fewer than three contributions, or when the usual cosine is no larger than chance. A
zero vector has no direction. When half are zero, none is too small: rows of tokens that a member did not see are zero.

An attack within the spread of honest contributions still works (Baruch et al. 2019, arXiv:1902.06156). Measured in
docs/adr/0004.

Inner products are fp64 sums, in the order that the BLAS chooses. Factors are rounded to few bits, so that simulations
agree with real processes, except for a contribution exactly at a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NORM_RATIO = 2.0  # to the usual norm, and to the optimiser's largest change: larger norms are scaled down
PROBATION_NORM_RATIO = 1.0  # likewise, of contributions on probation
MIN_NORM_RATIO = 0.25  # to the usual norm: smaller contributions are left out
NORM_EXPONENTS = (0.5, 0.75, 1.0)  # norm ∝ tokens^x: smallest, usual and largest x
MIN_COSINE_RATIO = 0.3  # to the usual cosine: contributions below it are left out
PROBATION_COSINE_RATIO = 0.8  # likewise, of contributions on probation
CHANCE_COSINE_SIGMAS = 4.0  # a usual cosine within this many standard deviations of unrelated vectors is chance
MIN_CONTRIBUTIONS = 3  # that are necessary to screen directions and small norms

_Bounds = tuple[float, float]  # largest ratio to the usual norm, smallest ratio to the usual cosine
_USUAL = MAX_NORM_RATIO, MIN_COSINE_RATIO
_CHUNK = 2**15  # elements that `inner_products` multiplies at a time
_FACTOR_BITS = 20  # kept of a factor; fp64 sums differ only in the last of their 53 bits


@dataclass(frozen=True)
class Screen:
    """Bounds on honest contributions, from the run spec and the plan."""

    max_change_per_token: float  # the largest change that the optimiser makes to an element per trained token
    least: float = MIN_NORM_RATIO  # smallest ratio to the usual norm; 0 if members take different tokens per step


class InnerProducts:
    """Pairwise inner products of n fp32 vectors that arrive in pieces. In fp64, products of fp32 values are exact."""

    def __init__(self, count: int, max_piece: int) -> None:
        """`count`: number of vectors. `max_piece`: the most elements of a piece."""
        self._wide_nC = torch.empty(count, max_piece, dtype=torch.float64)
        self._upper_nn = torch.zeros(count, count, dtype=torch.float64)  # upper triangle with the diagonal
        self._rows = [self._upper_nn[row, row:] for row in range(count)]

    def add(self, pieces: Iterable[Tensor]) -> None:
        """Add the next piece of every vector, [C] each. The iterable may reuse one tensor for all of them."""
        elements = 0
        for row_C, piece_C in zip(self._wide_nC, pieces, strict=True):
            elements = piece_C.numel()
            row_C[:elements] = piece_C
        wide_nC = self._wide_nC[:, :elements]
        for row, sums_m in enumerate(self._rows):
            torch.addmv(sums_m, wide_nC[row:], wide_nC[row], out=sums_m)

    def sums(self) -> Tensor:
        """The inner products, fp64 [n, n]."""
        return self._upper_nn + self._upper_nn.triu(1).T


def inner_products(values: Sequence[Tensor]) -> Tensor:
    """Pairwise inner products of whole fp32 tensors [E]: fp64 [n, n]."""
    elements = values[0].numel()
    products = InnerProducts(len(values), min(_CHUNK, elements))
    for first in range(0, elements, _CHUNK):
        products.add(value_E[first : first + _CHUNK] for value_E in values)
    return products.sums()


def factors_from_products(
    products_nn: Tensor, tokens: Sequence[int], elements: int, screen: Screen, on_probation: Sequence[bool] = ()
) -> tuple[float, ...]:
    """The factor of each contribution in the sum: 0 leaves it out, 1 keeps it, a value between scales it down.

    `products_nn`: inner products. `tokens`: positive, one per contribution. `elements`: the length of the part.
    `on_probation`: which contributions are; empty: none.
    """
    judging = [place for place in range(len(tokens)) if not (on_probation and on_probation[place])]
    if len(judging) == len(tokens):
        return _judge(products_nn, tokens, elements, screen)
    factors = [0.0] * len(tokens)

    def judge(places: list[int], bounds: _Bounds) -> tuple[float, ...]:
        chosen_nn = products_nn[places][:, places]
        return _judge(chosen_nn, [tokens[place] for place in places], elements, screen, bounds)

    for place, factor in zip(judging, judge(judging, _USUAL), strict=True):
        factors[place] = factor
    kept = [place for place in judging if factors[place] > 0]
    least = PROBATION_COSINE_RATIO if len(kept) > 1 else MIN_COSINE_RATIO  # one contribution agrees fully with itself
    for place in range(len(tokens)):
        if on_probation[place]:
            factors[place] = judge(judged_with(kept, place), (PROBATION_NORM_RATIO, least))[-1] if kept else 0.0
    return tuple(factors)


def judged_with(kept: Sequence[int], place: int) -> list[int]:
    """The contributions with which one on probation, the last in the list, is compared. `kept`: those not on probation.

    If only one is kept, it is listed twice: it alone then determines the size and direction that are accepted.
    """
    return [*kept, *(kept if len(kept) == 1 else ()), place]


def _judge(
    products_nn: Tensor, tokens: Sequence[int], elements: int, screen: Screen, bounds: _Bounds = _USUAL
) -> tuple[float, ...]:
    """The factors of contributions that are all compared with each other."""
    most, least_cosine = bounds
    tokens_n = torch.tensor(tokens, dtype=torch.float64)
    norms_n = products_nn.diagonal().sqrt()
    factors_n = (
        (_limits(norms_n, tokens_n, elements, screen.max_change_per_token, most) / norms_n)
        .clamp(max=1.0)
        .nan_to_num(nan=1.0)
    )
    kept = norms_n.nonzero().view(-1)
    for _ in range((len(kept) - 1) // 2 if len(kept) >= MIN_CONTRIBUTIONS else 0):
        worst = _worst_direction(products_nn[kept][:, kept], tokens_n[kept], elements, least_cosine)
        if worst is None:
            break
        factors_n[kept[worst]] = 0.0
        kept = torch.cat((kept[:worst], kept[worst + 1 :]))
    small = [index for index in _too_small(norms_n, tokens_n, screen.least) if factors_n[index] > 0]
    left_out = int((factors_n == 0).sum())
    factors_n[small[: max(0, (len(tokens) - 1) // 2 - left_out)]] = 0.0
    return tuple(_rounded(factor) for factor in factors_n.tolist())


def largest_norm(tokens: int, elements: int, screen: Screen) -> float:
    """The largest norm that screening accepts for so many tokens: what the optimiser can reach, times a margin."""
    return MAX_NORM_RATIO * screen.max_change_per_token * math.sqrt(elements) * tokens


class UsualNorm:
    """The norm limit of each contribution that follows from the usual norm, if only some norms are known."""

    def __init__(
        self, norms: Sequence[float], tokens: Sequence[int], unknown: Sequence[int], *, least: bool = False
    ) -> None:
        """Compute the possible usual norms.

        - `norms`, `tokens`: of the contributions that are known.
        - `unknown`: tokens of the others, which may have any norm.
        - `least`: compute the smallest possible limits; otherwise the largest.
        """
        self._choose, self._no_limit = (min, 0.0) if least else (max, math.inf)
        self._usual: list[tuple[int, float]] = []  # each possible pair (usual tokens, usual norm)
        nonzero = [(norm, count) for norm, count in zip(norms, tokens, strict=True) if norm > 0]
        total = len(nonzero) + len(unknown)
        # assume all unknown norms are above the known ones, or all below
        place = total // 2 - (len(unknown) if least else 0)
        if total < MIN_CONTRIBUTIONS or not 0 <= place < len(nonzero):
            return
        counts, first = sorted([*(count for _, count in nonzero), *unknown]), len(nonzero) // 2
        # the median of the nonzero contributions is one of these
        for middle in {*counts[first : first + len(unknown) + 1]}:
            norm = sorted(norm / (count / middle) ** NORM_EXPONENTS[1] for norm, count in nonzero)[place]
            self._usual.append((middle, norm))

    def limit(self, tokens: int) -> float:
        """The norm to which a contribution with `tokens` tokens is limited."""
        smallest, _, largest = NORM_EXPONENTS
        limits = [
            MAX_NORM_RATIO * norm * max((tokens / middle) ** smallest, (tokens / middle) ** largest)
            for middle, norm in self._usual
        ]
        return float(self._choose(limits, default=self._no_limit))


def _limits(norms_n: Tensor, tokens_n: Tensor, elements: int, max_change_per_token: float, most: float) -> Tensor:
    """The largest norm allowed for each contribution."""
    limits_n = most * max_change_per_token * math.sqrt(elements) * tokens_n
    nonzero = norms_n.nonzero().view(-1)
    if len(nonzero) >= MIN_CONTRIBUTIONS:
        smallest, usual, largest = NORM_EXPONENTS
        relative_n = tokens_n / _upper_median(tokens_n[nonzero])
        norm = _upper_median((norms_n / relative_n**usual)[nonzero])
        growth_n = torch.maximum(relative_n**smallest, relative_n**largest)
        limits_n = torch.minimum(limits_n, most * norm * growth_n)
    return limits_n


def _too_small(norms_n: Tensor, tokens_n: Tensor, min_ratio: float) -> list[int]:
    """Contributions whose norm is too small for their tokens, smallest first."""
    if len(norms_n) < MIN_CONTRIBUTIONS:
        return []
    smallest, usual, largest = NORM_EXPONENTS
    relative_n = tokens_n / _upper_median(tokens_n)
    norm = (norms_n / relative_n**usual).median()  # the lower median: fewer than half are below it
    ratios_n = norms_n / (norm * torch.minimum(relative_n**smallest, relative_n**largest))  # NaN when most are zero
    return [index for index in ratios_n.argsort().tolist() if ratios_n[index] < min_ratio]


def _worst_direction(products_nn: Tensor, tokens_n: Tensor, elements: int, least: float) -> int | None:
    """The contribution that agrees least with the others; None if it agrees enough."""
    norms_n, count = products_nn.diagonal().sqrt(), len(tokens_n)
    cosines_nn = products_nn / torch.outer(norms_n, norms_n)
    others_nn = ~torch.eye(count, dtype=torch.bool)
    rest_nm = cosines_nn[others_nn].view(count, count - 1)  # row j: to all others
    sorted_nm, order_nm = rest_nm.sort(dim=1)
    rank_nm = order_nm.argsort(dim=1)
    median_n = sorted_nm[:, (count - 1) // 2]
    # [j, i]: the upper median of row j without its cosine to i, from the ranks in the whole row
    middle = (count - 2) // 2
    without_nm = sorted_nm[:, middle + 1 : middle + 2].where(rank_nm <= middle, sorted_nm[:, middle : middle + 1])
    without_nn = torch.full_like(cosines_nn, math.nan)
    without_nn[others_nn] = without_nm.flatten()
    usual_n = without_nn.T[others_nn].view(count, count - 1).median(dim=1).values
    noise_n = (tokens_n / _upper_median(tokens_n)).sqrt().clamp(max=1.0)
    ratios_n = (median_n / (usual_n * noise_n)).where(usual_n > CHANCE_COSINE_SIGMAS / math.sqrt(elements), math.inf)
    worst = int(ratios_n.argmin())
    return worst if ratios_n[worst] < least else None


def _upper_median(values_n: Tensor) -> Tensor:
    """The median; the higher of the two middle values of an even number."""
    return values_n.sort().values[len(values_n) // 2]


def _rounded(factor: float) -> float:
    """Round to the first `_FACTOR_BITS` bits."""
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(round(math.ldexp(mantissa, _FACTOR_BITS)), exponent - _FACTOR_BITS)
