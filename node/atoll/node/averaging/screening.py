"""Which contributions to a part look like training, and how much of each enters its sum. Pure.

A reducer judges each part from the inner products of what the members sent, and from nothing else:

- *Size.* A pseudo-gradient grows with the work in it, about as tokens^¾ (measured: members with 4:4:2:1 tokens have
  norms of 1.7:1.7:1:0.6). What is more than twice as large as that rule and the median say is scaled down to it; what
  is less than a tenth is left out.
- *Direction.* Everybody's cosine to the sum of the others is compared with the usual one: the median of what the others
  have among themselves. Neither knows the one who is judged, so a large liar cannot lower the bar for itself. Honest
  members have 0.4 to 1.5 of it, noise 0, a flipped sign less than 0. Who has the lowest share, below 0.3, is left out,
  and the rest are judged again. Less work means more noise: the bar sinks with the square root of the tokens.
- *Copies.* Who says the same is no witness. Two contributions that agree much more than most do are not in each other's
  sum.

Fewer than half can be left out. Directions are not judged where fewer than three contribute, or where the usual cosine
is no more than chance: then there is nothing to agree with. Colluders who stay near the honest mean get through, as
through every rule that knows one round only (Baruch et al. 2019, arXiv:1902.06156). Measured in docs/adr/0004.

Inner products are sums in fp64 in a fixed order, so that who has the same bytes comes to the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 2.0  # of the usual norm: more is scaled down to it
LEAST = 0.1  # of the usual norm: less is left out
WORK_EXPONENT = 0.75  # of tokens in a norm
AGREEMENT = 0.3  # of the usual cosine: less is left out
CHANCE = 4.0  # standard deviations of the cosine of unrelated vectors
JUDGES = 3  # contributions, at least
TOO_ALIKE = 0.98  # cosine of the honest: copies cannot be told from them

_CHUNK = 2**13  # elements at a time, so that they stay in the cache


def inner_products(values: Sequence[Tensor]) -> Tensor:
    """Of every two fp32 tensors [E]: fp64 [n, n], summed in one order on any machine and any number of threads."""
    count, elements = len(values), values[0].numel()
    sums_nn = torch.zeros(count, count, dtype=torch.float64)
    for start in range(0, elements, _CHUNK):
        chunk_nC = torch.zeros(count, _CHUNK, dtype=torch.float64)
        for row, value_E in enumerate(values):
            piece = value_E[start : start + _CHUNK]
            chunk_nC[row, : piece.numel()] = piece
        for row in range(count):
            sums_nn[row, row:] += _fold(chunk_nC[row] * chunk_nC[row:])
    return sums_nn + sums_nn.triu(1).T


def judge(products_nn: Tensor, work: Sequence[int], elements: int) -> tuple[float, ...]:
    """What of each contribution enters the sum: 0 nothing of it, 1 all, between them the factor that scales it down.

    `products_nn` are their inner products, `work` their tokens (positive), `elements` the length of the part.
    """
    count = len(work)
    if count < JUDGES:
        return (1.0,) * count
    work_n = torch.tensor(work, dtype=torch.float64)
    norms_n = products_nn.diagonal().sqrt()
    sizes_n = norms_n / work_n**WORK_EXPONENT
    usual = sizes_n.sort().values[count // 2]
    if not usual:
        return (1.0,) * count
    sizes_n /= usual
    factors_n = torch.where(sizes_n > MOST, MOST / sizes_n, 1.0)
    spare = (count - 1) // 2  # who may still be left out
    small = [i for i in sizes_n.argsort().tolist() if sizes_n[i] < LEAST][:spare]
    factors_n[small] = 0.0
    for _ in range(spare - len(small)):
        worst = _worst(products_nn, work_n, factors_n, elements)
        if worst is None:
            break
        factors_n[worst] = 0.0
    return tuple(factors_n.tolist())


def _worst(products_nn: Tensor, work_n: Tensor, factors_n: Tensor, elements: int) -> int | None:
    """Who of those that are in agrees least with the others, if that is too little."""
    there = factors_n.nonzero().view(-1)
    products_nn, work_n = products_nn[there][:, there], work_n[there]
    pull_n = work_n * factors_n[there]
    norms_n = products_nn.diagonal().sqrt()
    mutual_nn = products_nn / torch.outer(norms_n, norms_n)
    alone_nn = ~torch.eye(len(there), dtype=torch.bool)
    agreeing = mutual_nn[alone_nn].quantile(0.75, interpolation="higher")  # of two honest ones: those are a majority
    copies_nn = mutual_nn > ((1 + agreeing) / 2 if agreeing < TOO_ALIKE else math.inf)
    sums_nn = torch.where(alone_nn & ~copies_nn, pull_n, 0.0)  # row i: the sum that i is compared with
    against_nn = sums_nn @ products_nn
    inner_n = (sums_nn * products_nn).sum(dim=1)
    square_n = (sums_nn * against_nn).sum(dim=1)
    # [i, j]: of j, when i is not there
    inner_nn = inner_n - (sums_nn * products_nn).T
    square_nn = square_n - 2 * (sums_nn * against_nn).T + sums_nn.T**2 * norms_n.unsqueeze(1) ** 2
    cosine_n = inner_n / (norms_n * square_n.clamp(min=0).sqrt())
    cosine_nn = inner_nn / (norms_n * square_nn.clamp(min=0).sqrt())
    usual_n = cosine_nn[alone_nn].view(len(there), -1).nanmedian(dim=1).values
    noise_n = (work_n / work_n.median()).sqrt().clamp(max=1.0)
    merit_n = torch.where(usual_n > CHANCE / math.sqrt(elements), cosine_n / (usual_n * noise_n), math.inf)
    merit_n = merit_n.nan_to_num(nan=math.inf, posinf=math.inf)
    worst = int(merit_n.argmin())
    return int(there[worst]) if merit_n[worst] < AGREEMENT else None


def _fold(terms_nC: Tensor) -> Tensor:
    """Sums of rows whose length is a power of two, by halves: elementwise additions only, so in one order."""
    while terms_nC.shape[1] > 1:
        half = terms_nC.shape[1] // 2
        terms_nC = terms_nC[:, :half] + terms_nC[:, half:]
    return terms_nC[:, 0]
