"""The run's deterministic order of samples: sample number → window of the corpus. Pure, O(1) memory a source.

Samples are numbered 0, 1, 2, … without end. `SampleOrder` is for text that every node has whole: each pass over it
(epoch) has its own permutation of all windows. `ShardedOrder` is for a corpus that nodes fetch in blocks while they
train. There a run of samples must lie close together, so that a node fetches little more than it trains:

- Windows are cut into stretches of about 1 MiB, and each epoch has its own permutation of the stretches.
- In a stretch, windows come in order but for groups of 16 KiB, whose windows are permuted.
- Documents were permuted when the corpus was built. So a stretch is a random draw of documents.

A mixture weighs the sources. Sample numbers are dealt to sources so evenly that each has its share of every run of
samples, up to one sample (`_deal`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_FEISTEL_ROUNDS = 6
STRETCH_BYTES = 1 << 20
GROUP_BYTES = 1 << 14
PATTERN_SAMPLES = 1 << 16  # the pattern of sources repeats after these


def splitmix64(value: int) -> int:
    """Apply SplitMix64's finaliser, a bijection of 64-bit integers that looks random."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A permutation of `0 … size - 1`.

    A keyed Feistel network over the next power of four, with cycle walking back into range (Black & Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains"). It uses integer arithmetic only and is equal on every machine.
    """

    def __init__(self, seed: int, number: int, size: int) -> None:
        """`seed` is mixed already (`splitmix64`); `number` tells permutations of one seed apart."""
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = tuple(splitmix64(seed ^ splitmix64(number * _FEISTEL_ROUNDS + i)) for i in range(_FEISTEL_ROUNDS))

    def __getitem__(self, position: int) -> int:
        position = self._permute(position)
        while position >= self.size:  # fewer than four turns on average: the domain is at most 4× too large
            position = self._permute(position)
        return position

    def _permute(self, position: int) -> int:
        left, right = position >> self._half_bits, position & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (splitmix64(right ^ key) & self._half_mask)
        return left << self._half_bits | right


class SampleOrder:
    """A map from the run's sample numbers to windows `0 … samples - 1`."""

    def __init__(self, seed: int, samples: int) -> None:
        if samples < 1:
            raise ValueError(f"samples is {samples}; it must be at least 1")
        self.samples = samples
        self._seed = splitmix64(seed & _MASK)
        self._last = 0, Permutation(self._seed, 0, samples)  # replaced as a whole: several threads may ask

    def window(self, sample: int) -> int:
        """Return the window of sample number `sample` (0 or more)."""
        epoch, position = divmod(sample, self.samples)
        number, permutation = self._last
        if number != epoch:
            permutation = Permutation(self._seed, epoch, self.samples)
            self._last = epoch, permutation
        return permutation[position]


@dataclass(frozen=True)
class WeighedSources:
    """A stage of a mixture: from sample `start` on, sources have these weights. Their sum does not matter."""

    start: int
    weights: tuple[float, ...]


class ShardedOrder:
    """A map from the run's sample numbers to a source and one of its training windows."""

    def __init__(self, seed: int, windows: Sequence[int], stages: Sequence[WeighedSources], window_bytes: int) -> None:
        """`windows`: training windows of each source. `stages` begin at sample 0 and are in order.

        `window_bytes`: stored bytes of a window; decides how many windows a stretch and a group have.
        """
        if not stages or stages[0].start != 0 or any(b.start <= a.start for a, b in pairwise(stages)):
            raise ValueError("stages of a mixture begin at sample 0 and follow each other")
        for stage in stages:
            if any(weight and not count for weight, count in zip(stage.weights, windows, strict=True)):
                raise ValueError("a source that has a weight needs a window")
        self._windows = tuple(windows)
        self._stages = tuple(_Stage(stage) for stage in stages)
        self._starts = [stage.start for stage in stages]
        for earlier, later in pairwise(self._stages):
            later.begin_after(earlier)
        per_stretch, per_group = max(1, STRETCH_BYTES // window_bytes), max(1, GROUP_BYTES // window_bytes)
        self._sources = tuple(
            _SourceOrder(splitmix64(splitmix64(seed & _MASK) + number), count, per_stretch, per_group)
            for number, count in enumerate(windows)
        )

    def place(self, sample: int) -> tuple[int, int]:
        """Return source and window of sample number `sample` (0 or more)."""
        source, turn = self._stages[bisect_right(self._starts, sample) - 1].deal(sample)
        return source, self._sources[source].window(turn)

    def shares(self, start: int, stop: int) -> Mapping[int, int]:
        """Return how many of the samples from `start` to `stop` each source has."""
        ends = [*self._starts[1:], stop]
        counts = np.zeros(len(self._windows), dtype=np.int64)
        for stage, begin, end in zip(self._stages, self._starts, ends, strict=True):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                counts += stage.turns(last) - stage.turns(first)
        return {number: int(count) for number, count in enumerate(counts) if count}


class _Stage:
    """Deals sample numbers to sources by weight, in a pattern that repeats."""

    def __init__(self, stage: WeighedSources) -> None:
        self._start = stage.start
        self._pattern = _deal(stage.weights)
        self._counts = np.bincount(self._pattern, minlength=len(stage.weights)).astype(np.int64)
        self._turns = np.zeros(len(self._pattern), dtype=np.int64)  # how often the same source came before
        for source in range(len(stage.weights)):
            (at,) = np.nonzero(self._pattern == source)
            self._turns[at] = np.arange(len(at))
        self._before = np.zeros(len(stage.weights), dtype=np.int64)  # turns of each source in earlier stages

    def begin_after(self, earlier: _Stage) -> None:
        """Let each source go on where it is when the earlier stage ends."""
        self._before = earlier.turns(self._start)

    def turns(self, sample: int) -> NDArray[np.int64]:
        """Return how many samples each source has had before `sample`."""
        times, rest = divmod(sample - self._start, len(self._pattern))
        return self._before + times * self._counts + np.bincount(self._pattern[:rest], minlength=len(self._counts))

    def deal(self, sample: int) -> tuple[int, int]:
        times, slot = divmod(sample - self._start, len(self._pattern))
        source = int(self._pattern[slot])
        return source, int(self._before[source] + times * self._counts[source] + self._turns[slot])


def _deal(weights: Sequence[float]) -> NDArray[np.int64]:
    """Return the source of each slot of a pattern, spread evenly.

    A source with n of the slots wants slots (j + ½) / n of the way through the pattern, j = 0 … n − 1, and all wishes
    are served in order. n is the weight's share of the slots, rounded so that the sum is right (largest remainder).
    """
    total = sum(weights)
    if not total > 0:
        raise ValueError("the weights of a mixture need a positive sum")
    if sum(weight > 0 for weight in weights) == 1:
        return np.array([next(number for number, weight in enumerate(weights) if weight > 0)], dtype=np.int64)
    exact = [weight / total * PATTERN_SAMPLES for weight in weights]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda number: (counts[number] - exact[number], number))
    for number in by_rest[: PATTERN_SAMPLES - sum(counts)]:
        counts[number] += 1
    # integers, so that every machine sorts alike: (2j + 1) · (all slots) // n stands for (j + ½) / n
    wishes = [((2 * np.arange(n, dtype=np.int64) + 1) << 32) // n for n in counts if n]
    sources = [np.full(n, number, dtype=np.int64) for number, n in enumerate(counts) if n]
    order = np.argsort(np.concatenate(wishes), kind="stable")
    return np.concatenate(sources)[order]


class _SourceOrder:
    """A source's windows in order of training, epoch after epoch."""

    def __init__(self, seed: int, windows: int, per_stretch: int, per_group: int) -> None:
        self._seed, self._windows = seed, windows
        self._per_stretch, self._per_group = per_stretch, per_group
        self._stretches = windows // per_stretch  # whole ones; what remains comes last
        # of the epoch and of the group that were asked for last; replaced as a whole: several threads may ask
        self._last_epoch = -1, Permutation(seed, 0, 1)
        self._last_group = (-1, -1), Permutation(seed, 0, 1)

    def window(self, turn: int) -> int:
        epoch, position = divmod(turn, self._windows)
        place, offset = divmod(position, self._per_stretch)
        whole = place < self._stretches
        stretch = self._order_of_stretches(epoch)[place] if whole else self._stretches
        size = self._per_stretch if whole else self._windows - self._stretches * self._per_stretch
        group, inside = divmod(offset, self._per_group)
        first = group * self._per_group
        start = stretch * self._per_stretch + first
        return start + self._order_in_group(epoch, start, min(self._per_group, size - first))[inside]

    def _order_of_stretches(self, epoch: int) -> Permutation:
        number, order = self._last_epoch
        if number != epoch:
            order = Permutation(self._seed, epoch, self._stretches)
            self._last_epoch = epoch, order
        return order

    def _order_in_group(self, epoch: int, start: int, size: int) -> Permutation:
        key, order = self._last_group
        if key != (epoch, start):
            order = Permutation(splitmix64(self._seed + splitmix64(start + 1)), epoch, size)
            self._last_group = (epoch, start), order
        return order
