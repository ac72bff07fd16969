"""Which contributions to a part look like training, and how much of each enters its sum. Pure.

A reducer judges each part from the inner products of what the members sent, and from nothing else:

- *Size.* A pseudo-gradient grows with the work in it, about as tokens^¾ (measured; between the root, when steps are
  noise, and tokens, when they all agree). What is more than twice the usual size for its tokens is scaled down to that.
  And no more than twice what the optimiser can move in so many steps: that holds for one contribution, too, and where
  most are zero.
- *Direction.* Of everybody's cosines to the others, the median counts: fewer than half can neither raise their own nor
  lower an honest one below the others' lowest. It is compared with the usual one, which those others have among
  themselves. Noise has 0 of that, a flipped sign less. Who has the lowest share, below 0.3, is left out, and the rest
  are judged again. Less work means more noise: the bar sinks with the square root of the tokens.

Fewer than half can be left out. Directions are not judged where fewer than three contribute, or where the usual cosine
is no more than chance: then there is nothing to agree with. A zero vector is neither judged nor heard: rows of tokens
that a member did not see are zero. What a lie inside the spread of the honest can do (Baruch et al. 2019,
arXiv:1902.06156), it still can. Measured in docs/adr/0004.

Inner products are sums in fp64 in a fixed order, the same on any machine. What follows from them is rounded as the
machine likes: two machines may differ about who stands exactly at a bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 2.0  # of the usual norm, and of what the optimiser can do: more is scaled down to it
WORK_EXPONENTS = (0.5, 0.75, 1.0)  # of tokens in a norm: at least, usually, at most
AGREEMENT = 0.3  # of the usual cosine: less is left out
CHANCE = 4.0  # standard deviations of the cosine of unrelated vectors
JUDGES = 3  # contributions, at least

_LANES = 2**10, 2**14  # sums of a product that run side by side: at least, at most
_SUMS = 2**19  # of all products, about: as many as stay in the cache


class InnerProducts:
    """Of every two of n fp32 vectors that come piece by piece, in fp64, summed in one order on any machine.

    Element i is added to lane i modulo their number, which follows from n; the lanes are folded at the end. A product
    of two fp32 numbers is exact in fp64, so it makes no difference who fuses it with its sum.
    """

    def __init__(self, count: int) -> None:
        least, most = _LANES
        self.lanes = min(most, 2 ** (max(least, _SUMS // (count * (count + 1) // 2)).bit_length() - 1))
        self._chunk_nL = torch.empty(count, self.lanes, dtype=torch.float64)
        self._sums = [torch.zeros(count - row, self.lanes, dtype=torch.float64) for row in range(count)]
        self._factors = [(self._chunk_nL[row], self._chunk_nL[row:]) for row in range(count)]

    def add(self, values_nC: Tensor) -> None:
        """The next elements of all; as many as fill all lanes some times over, but for the last."""
        for start in range(0, values_nC.shape[1], self.lanes):
            piece_nC = values_nC[:, start : start + self.lanes]
            if piece_nC.shape[1] < self.lanes:
                self._chunk_nL.zero_()
            self._chunk_nL[:, : piece_nC.shape[1]] = piece_nC
            for sums_mL, (one_L, others_mL) in zip(self._sums, self._factors, strict=True):
                sums_mL.addcmul_(one_L, others_mL)

    def sums(self) -> Tensor:
        """fp64 [n, n]."""
        count = len(self._sums)
        products_nn = torch.zeros(count, count, dtype=torch.float64)
        for row, sums_mL in enumerate(self._sums):
            products_nn[row, row:] = _fold(sums_mL)
        return products_nn + products_nn.triu(1).T


def inner_products(values: Sequence[Tensor]) -> Tensor:
    """Of every two fp32 tensors [E]: fp64 [n, n]."""
    products = InnerProducts(len(values))
    for start in range(0, values[0].numel(), products.lanes):
        products.add(torch.stack([value_E[start : start + products.lanes] for value_E in values]))
    return products.sums()


def judge(products_nn: Tensor, work: Sequence[int], elements: int, change: float) -> tuple[float, ...]:
    """What of each contribution enters the sum: 0 nothing of it, 1 all, between them the factor that scales it down.

    `products_nn` are their inner products, `work` their tokens (positive), `elements` the length of the part, `change`
    the most by which the optimiser moves one element while it trains one token.
    """
    work_n = torch.tensor(work, dtype=torch.float64)
    norms_n = products_nn.diagonal().sqrt()
    factors_n = (_limits(norms_n, work_n, elements, change) / norms_n).clamp(max=1.0).nan_to_num(nan=1.0)
    there = norms_n.nonzero().view(-1)
    for _ in range((len(there) - 1) // 2 if len(there) >= JUDGES else 0):
        worst = _worst(products_nn[there][:, there], work_n[there], elements)
        if worst is None:
            break
        factors_n[there[worst]] = 0.0
        there = torch.cat((there[:worst], there[worst + 1 :]))
    return tuple(factors_n.tolist())


def _limits(norms_n: Tensor, work_n: Tensor, elements: int, change: float) -> Tensor:
    """The largest norm that each may have."""
    limits_n = MOST * change * math.sqrt(elements) * work_n
    there = norms_n.nonzero().view(-1)
    if len(there) >= JUDGES:
        least, usually, most = WORK_EXPONENTS
        relative_n = work_n / _upper_median(work_n[there])
        usual = _upper_median((norms_n / relative_n**usually)[there])
        limits_n = torch.minimum(limits_n, MOST * usual * torch.maximum(relative_n**least, relative_n**most))
    return limits_n


def _worst(products_nn: Tensor, work_n: Tensor, elements: int) -> int | None:
    """Who agrees least with the others, if that is too little."""
    norms_n, count = products_nn.diagonal().sqrt(), len(work_n)
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
    bar_n = (work_n / _upper_median(work_n)).sqrt().clamp(max=1.0)
    merits_n = (median_n / (usual_n * bar_n)).where(usual_n > CHANCE / math.sqrt(elements), math.inf)
    worst = int(merits_n.argmin())
    return worst if merits_n[worst] < AGREEMENT else None


def _upper_median(values_n: Tensor) -> Tensor:
    """The higher one of the two in the middle, where there are two."""
    return values_n.sort().values[len(values_n) // 2]


def _fold(terms_nC: Tensor) -> Tensor:
    """Sums of rows whose length is a power of two, by halves: elementwise additions only, so in one order."""
    while terms_nC.shape[1] > 1:
        half = terms_nC.shape[1] // 2
        terms_nC = terms_nC[:, :half] + terms_nC[:, half:]
    return terms_nC[:, 0]
