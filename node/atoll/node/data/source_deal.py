"""Dealing of sample numbers to the sources of a mixture. Pure; equal on every machine.

It needs no corpus: the source of a sample follows from the weights alone. `data/sample_order.py` says which window of
the source it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from atoll.core.data_position import SampleRange

PATTERN_SAMPLES = 1 << 16  # length of the pattern of sources, which repeats


@dataclass(frozen=True)
class WeighedSources:
    """A stage of a mixture: from sample `start` on, sources have these weights. Their sum does not matter."""

    start: int
    weights: tuple[float, ...]


class SourceDeal:
    """Deals sample numbers to sources, in stages."""

    def __init__(self, stages: Sequence[WeighedSources]) -> None:
        """`stages` begin at sample 0 and are in order.

        Raises `ValueError` if they do not, or a stage's weights are all 0.
        """
        if not stages or stages[0].start != 0 or any(b.start <= a.start for a, b in pairwise(stages)):
            raise ValueError("stages of a mixture begin at sample 0 and follow each other")
        self._stages = tuple(_Stage(stage) for stage in stages)
        self._starts = [stage.start for stage in stages]
        self._sources = len(stages[0].weights)
        for earlier, later in pairwise(self._stages):
            later.begin_after(earlier)

    def deal(self, sample: int) -> tuple[int, int]:
        """Return the source of sample number `sample` (0 or more), and how many earlier samples that source had."""
        return self._stages[bisect_right(self._starts, sample) - 1].deal(sample)

    def counts(self, ranges: Sequence[SampleRange]) -> NDArray[np.int64]:
        """Return how many of the samples in half-open `ranges` each source has."""
        found = np.zeros(self._sources, dtype=np.int64)
        for stage, inside in self._by_stage(ranges):
            found += stage.counts(inside)
        return found

    def wanted(self, ranges: Sequence[SampleRange]) -> NDArray[np.float64]:
        """Return how many samples of `ranges` each source would have if its weight were met exactly."""
        found = np.zeros(self._sources, dtype=np.float64)
        for stage, inside in self._by_stage(ranges):
            found += stage.weights * float(np.diff(inside).sum())
        return found

    def _by_stage(self, ranges: Sequence[SampleRange]) -> list[tuple[_Stage, NDArray[np.int64]]]:
        """Return the parts [N, 2] of the ranges in each stage; a part may be empty."""
        whole = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        ends = [*self._starts[1:], np.iinfo(np.int64).max]
        bounds = zip(self._stages, self._starts, ends, strict=True)
        return [(stage, np.clip(whole, start, end)) for stage, start, end in bounds]


class _Stage:
    """Deals sample numbers to sources by weight, in a pattern that repeats."""

    def __init__(self, stage: WeighedSources) -> None:
        self._start = stage.start
        self._pattern = _deal(stage.weights)
        exact = np.array(stage.weights, dtype=np.float64)
        self.weights: NDArray[np.float64] = exact / exact.sum()
        self._counts = np.bincount(self._pattern, minlength=len(stage.weights)).astype(np.int64)
        # how many earlier slots of the pattern have the same source
        self._turns = np.zeros(len(self._pattern), dtype=np.int64)
        self._places = [np.nonzero(self._pattern == source)[0] for source in range(len(stage.weights))]
        for places in self._places:
            self._turns[places] = np.arange(len(places))
        self._before = np.zeros(len(stage.weights), dtype=np.int64)  # turns of each source in earlier stages

    def begin_after(self, earlier: _Stage) -> None:
        """Let each source continue after the samples that it had in the earlier stage."""
        self._before = earlier.turns(np.array([self._start]))[0]

    def turns(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many samples each source has had before each of `samples` [N], as [N, sources]."""
        times, rests = np.divmod(samples - self._start, len(self._pattern))
        in_pattern = np.stack([np.searchsorted(places, rests) for places in self._places], axis=1)
        return np.asarray(self._before + times[:, None] * self._counts + in_pattern, dtype=np.int64)

    def counts(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many samples of the ranges [N, 2] each source has."""
        found: NDArray[np.int64] = np.sum(self.turns(ranges[:, 1]) - self.turns(ranges[:, 0]), axis=0)
        return found

    def deal(self, sample: int) -> tuple[int, int]:
        times, slot = divmod(sample - self._start, len(self._pattern))
        source = int(self._pattern[slot])
        return source, int(self._before[source] + times * self._counts[source] + self._turns[slot])


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Return shares of `total` by weight, as integers with that sum (largest remainder).

    It uses fractions, because Python 3.12 sums floats differently from 3.11, and nodes with both must agree.
    """
    exact = [Fraction(weight) for weight in weights]
    if not sum(exact) > 0:
        raise ValueError("weights need a positive sum")
    shares = [weight * total / sum(exact) for weight in exact]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(weights)), key=lambda number: (counts[number] - shares[number], number))
    for number in by_rest[: total - sum(counts)]:
        counts[number] += 1
    return counts


def _deal(weights: Sequence[float]) -> NDArray[np.int64]:
    """Return the source of each slot of a pattern, spread evenly.

    A source with n of the slots wants slots (j + ½) / n of the way through the pattern, j = 0 … n − 1, and all wishes
    are served in order. n is the weight's share of the slots, rounded so that the sum is right (largest remainder).

    In any run of slots, a source of share s among k sources has its share up to 1 + k·s samples: where all wishes up to
    x of the way are served, each source has x·n up to ½, so the slot is x of the way up to k/2 slots.
    """
    if sum(weight > 0 for weight in weights) == 1:
        return np.array([next(number for number, weight in enumerate(weights) if weight > 0)], dtype=np.int64)
    counts = apportion(weights, PATTERN_SAMPLES)
    if any(weight and not count for weight, count in zip(weights, counts, strict=True)):
        raise ValueError(f"a source has less than 1/{PATTERN_SAMPLES} of the samples")
    # integers, so that every machine sorts alike: (2j + 1) · (all slots) // n stands for (j + ½) / n
    wishes = [((2 * np.arange(n, dtype=np.int64) + 1) << 32) // n for n in counts if n]
    sources = [np.full(n, number, dtype=np.int64) for number, n in enumerate(counts) if n]
    order = np.argsort(np.concatenate(wishes), kind="stable")
    return np.concatenate(sources)[order]
