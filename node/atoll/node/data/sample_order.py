"""The run's deterministic order of samples: sample number → window of the corpus. Pure; equal on every machine.

Samples are numbered 0, 1, 2, … without end. `SampleOrder` is for text that every node has whole: each pass over it
(epoch) has its own permutation of all windows. `ShardedOrder` is for a corpus that nodes fetch in blocks while they
train. There a run of samples must lie close together, so that a node fetches little more than it trains, and must still
mix text from many places:

- Each epoch has its own permutation of the shards. `SHUFFLED_SHARDS` of them at a time are mixed: a node needs the
  digests of a few shards only.
- Their windows are cut into units of 64 KiB (less in a small corpus), and the units are permuted.
- A few units at a time are woven: a row has a group of 8 KiB of each, and the windows of a row are permuted. So windows
  that follow each other come from several places.

A mixture weighs the sources. Sample numbers are dealt to sources so evenly that each has its share of every run of
samples, up to a few samples (`data/source_deal.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from atoll.node.data.source_deal import SourceDeal, WeighedSources

_MASK = (1 << 64) - 1
_FEISTEL_ROUNDS = 6
ORDER_VERSION = 1  # raise it when a sample number gets another window
UNIT_BYTES = 1 << 16
_LEAST_UNIT_BYTES = 1 << 13
_UNITS = 1 << 12  # that a source should have at least, however small it is
GROUP_BYTES = 1 << 13
WOVEN_UNITS = 4  # rows of 32 KiB: if a lease begins or ends within a row, two members fetch the whole row
WOVEN_SMALL_UNITS = 32  # in a small source, which is fetched whole anyway
SHUFFLED_SHARDS = 16


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
        """`seed` is already mixed (`splitmix64`); `number` selects one of the permutations of that seed."""
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
        self._last = 0, Permutation(self._seed, 0, samples)  # replaced as a whole: several threads may read it

    def window(self, sample: int) -> int:
        """Return the window of sample number `sample` (0 or more)."""
        epoch, position = divmod(sample, self.samples)
        number, permutation = self._last
        if number != epoch:
            permutation = Permutation(self._seed, epoch, self.samples)
            self._last = epoch, permutation
        return permutation[position]


@dataclass(frozen=True)
class SourceWindows:
    """The trained part of a source: windows of each shard, and how many windows make a unit."""

    shards: tuple[int, ...]  # training windows of each
    per_unit: int
    woven_units: int = WOVEN_UNITS

    @property
    def windows(self) -> int:
        return sum(self.shards)


def cut_into_units(shards: Sequence[int], source_bytes: int, window_bytes: int) -> SourceWindows:
    """Return how the windows of a source are cut. `source_bytes` are those of all its tokens."""
    unit = UNIT_BYTES
    while unit > _LEAST_UNIT_BYTES and source_bytes // unit < _UNITS:
        unit //= 2
    woven = WOVEN_UNITS if unit == UNIT_BYTES else WOVEN_SMALL_UNITS
    return SourceWindows(tuple(shards), max(1, unit // window_bytes), woven)


class ShardedOrder:
    """A map from the run's sample numbers to a source, one of its shards, and a training window of the shard."""

    def __init__(
        self, seed: int, sources: Sequence[SourceWindows], stages: Sequence[WeighedSources], window_bytes: int
    ) -> None:
        """`stages` begin at sample 0 and are in order. `window_bytes`: stored bytes of a window."""
        self._deal = SourceDeal(stages)
        for stage in stages:
            if any(weight and not source.windows for weight, source in zip(stage.weights, sources, strict=True)):
                raise ValueError("a source that has a weight needs a window")
        mixed, per_group = splitmix64(seed & _MASK), max(1, GROUP_BYTES // window_bytes)
        self._sources = tuple(
            _SourceOrder(splitmix64(mixed + number), source, per_group) for number, source in enumerate(sources)
        )

    def place(self, sample: int) -> tuple[int, int, int]:
        """Return source, shard, and window in the shard, of sample number `sample` (0 or more)."""
        source, turn = self._deal.deal(sample)
        return (source, *self._sources[source].place(turn))


class _SourceOrder:
    """A source's windows in order of training, epoch after epoch.

    Results for an epoch, a group of shards or a row are cached until others are needed. Several threads may call it.
    """

    def __init__(self, seed: int, source: SourceWindows, per_group: int) -> None:
        self._seed, self._source, self._per_group = seed, source, per_group
        self._windows = source.windows
        # two each: one thread may read ahead over a boundary while another is still before it
        self._epoch = lru_cache(2)(lambda number: _Epoch(seed, number, source.shards))
        self._shuffled = lru_cache(4)(self._shuffle)

    def place(self, turn: int) -> tuple[int, int]:
        number, position = divmod(turn, self._windows)
        starts = self._epoch(number).starts
        part = bisect_right(starts, position) - 1
        return self._shuffled(number, part).place(position - starts[part])

    def _shuffle(self, epoch: int, part: int) -> _ShuffledShards:
        members = self._epoch(epoch).shards[part * SHUFFLED_SHARDS : (part + 1) * SHUFFLED_SHARDS]
        return _ShuffledShards(self._seed, (epoch, part), members, self._source, self._per_group)


class _Epoch:
    """The order of shards in one epoch, and at which position each `SHUFFLED_SHARDS` of them begin."""

    def __init__(self, seed: int, number: int, windows: Sequence[int]) -> None:
        self.number = number
        order = Permutation(seed, number, len(windows))
        self.shards = [order[place] for place in range(len(windows))]
        sizes = np.array([windows[shard] for shard in self.shards], dtype=np.int64)
        sums = np.add.reduceat(sizes, np.arange(0, len(sizes), SHUFFLED_SHARDS))
        self.starts = [0, *np.cumsum(sums).tolist()][:-1]


class _ShuffledShards:
    """Some shards whose units are mixed. Windows that make no whole unit come last."""

    def __init__(
        self, seed: int, key: tuple[int, int], shards: Sequence[int], source: SourceWindows, per_group: int
    ) -> None:
        self.key, self._shards, self._source, self._per_group = key, shards, source, per_group
        counts = [source.shards[shard] for shard in shards]
        self._units = list(accumulate((count // source.per_unit for count in counts), initial=0))
        self._rests = list(accumulate((count % source.per_unit for count in counts), initial=0))
        self._seed = splitmix64(seed ^ splitmix64(key[1] + 1))
        self._order = Permutation(self._seed, key[0], max(1, self._units[-1]))
        self._order_of_rests = Permutation(splitmix64(self._seed), key[0], max(1, self._rests[-1]))
        self._last_row = (-1, -1), self._order

    def place(self, position: int) -> tuple[int, int]:
        """Return the shard, and the window in that shard."""
        per_unit = self._source.per_unit
        if position >= self._units[-1] * per_unit:
            return self._place_in_rests(self._order_of_rests[position - self._units[-1] * per_unit])
        weave, offset = divmod(position, self._source.woven_units * per_unit)
        first_unit = weave * self._source.woven_units
        woven = min(self._source.woven_units, self._units[-1] - first_unit)
        row, inside = divmod(offset, woven * self._per_group)
        first = row * self._per_group
        in_group = min(self._per_group, per_unit - first)
        which, window = divmod(self._row(weave, row, woven * in_group)[inside], in_group)
        unit = self._order[first_unit + which]
        member = bisect_right(self._units, unit) - 1
        return self._shards[member], (unit - self._units[member]) * per_unit + first + window

    def _row(self, weave: int, row: int, size: int) -> Permutation:
        key, order = self._last_row
        if key != (weave, row):
            order = Permutation(splitmix64(splitmix64(self._seed ^ splitmix64(weave)) + row), self.key[0], size)
            self._last_row = (weave, row), order
        return order

    def _place_in_rests(self, rest: int) -> tuple[int, int]:
        member = bisect_right(self._rests, rest) - 1
        whole = (self._units[member + 1] - self._units[member]) * self._source.per_unit
        return self._shards[member], whole + rest - self._rests[member]
