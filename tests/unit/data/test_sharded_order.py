"""Order of samples of a corpus of shards: once an epoch, close together, and in the right mixture."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.node.data.sample_order import (
    GROUP_BYTES,
    SHUFFLED_SHARDS,
    WOVEN_SMALL_UNITS,
    WOVEN_UNITS,
    ShardedOrder,
    SourceWindows,
    cut_into_units,
)
from atoll.node.data.source_deal import PATTERN_SAMPLES, SourceDeal, WeighedSources


def order_of(
    shards: list[list[int]], weights: list[float] | None = None, seed: int = 1, size: int = 1 << 12, per_unit: int = 16
) -> ShardedOrder:
    sources = [SourceWindows(tuple(counts), per_unit) for counts in shards]
    weights = weights or [float(sum(counts)) for counts in shards]
    return ShardedOrder(seed, sources, [WeighedSources(0, tuple(weights))], size)


SHARDS = st.lists(st.integers(0, 70), min_size=1, max_size=40).filter(any)


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.integers(0, 2**63), st.sampled_from([64, 1 << 12, 1 << 14, 1 << 20]), st.integers(1, 40))
def test_every_window_comes_once_in_each_epoch(shards: list[int], seed: int, size: int, per_unit: int) -> None:
    order, windows = order_of([shards], seed=seed, size=size, per_unit=per_unit), sum(shards)
    everything = [(0, shard, window) for shard, count in enumerate(shards) for window in range(count)]
    for epoch in range(3):
        places = [order.place(sample) for sample in range(epoch * windows, (epoch + 1) * windows)]
        assert sorted(places) == everything


def test_epochs_and_seeds_have_other_orders() -> None:
    shards = [[160] * 20]
    first, second = ([order_of(shards, seed=3).place(n) for n in range(s, s + 3200)] for s in (0, 3200))
    assert first != second
    assert first != [order_of(shards, seed=4).place(n) for n in range(3200)]
    assert first != sorted(first)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40_000), st.integers(1, 2000), st.sampled_from([1 << 10, 1 << 12, 1 << 14]))
def test_a_run_of_samples_lies_in_few_groups_and_shards(first: int, count: int, size: int) -> None:
    """What a lease touches is hardly more than what it trains, and needs the digests of a few shards."""
    per_unit, per_group = cut_into_units((), 10**9, size).per_unit, max(1, GROUP_BYTES // size)
    order = order_of([[250 * per_unit] * 200], size=size, per_unit=per_unit)
    places = [order.place(sample) for sample in range(first, first + count)]
    groups = {(shard, window // per_group) for _, shard, window in places}
    assert len(groups) <= count // per_group + 2 * WOVEN_UNITS
    of_a_part = SHUFFLED_SHARDS * 250 * per_unit
    assert len({shard for _, shard, _ in places}) <= SHUFFLED_SHARDS * (count // of_a_part + 2)


def test_samples_that_follow_each_other_come_from_several_places() -> None:
    order = order_of([[1600] * 16], per_unit=16, size=1 << 12)
    units = [(shard, window // 16) for _, shard, window in map(order.place, range(64 * 16))]
    assert len(set(units)) == 64
    assert len({shard for shard, _ in units}) >= 12
    for start in range(0, len(units), 16):
        assert len(set(units[start : start + 16])) == WOVEN_UNITS
    assert sum(len(set(units[start : start + 4])) >= 2 for start in range(0, len(units), 4)) > 230


def test_a_small_source_has_smaller_units_and_mixes_more_of_them() -> None:
    def cut(size: int, window: int) -> tuple[int, int]:
        found = cut_into_units((7,), size, window)
        return found.per_unit, found.woven_units

    assert cut(10**12, 2048) == (32, WOVEN_UNITS)
    assert cut(8 << 20, 128) == (64, WOVEN_SMALL_UNITS)
    assert cut(8 << 20, 1 << 20) == (1, WOVEN_SMALL_UNITS)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.5, 1.0, 7.3, 100.0]), min_size=1, max_size=5),
    st.integers(0, 100_000),
    st.integers(1, 20_000),
)
@example([7.3, 7.3, 7.3, 7.3, 100.0], 3, 380)
def test_each_source_has_its_share_of_any_run_of_samples(weights: list[float], first: int, count: int) -> None:
    if not sum(weights) > 1e-3:
        weights[0] = 1.0
    deal = SourceDeal([WeighedSources(0, tuple(weights))])
    found = deal.counts([(first, first + count)])
    assert sum(found) == count
    assert sum(deal.wanted([(first, first + count)])) == pytest.approx(count)
    weighed = sum(weight > 0 for weight in weights)
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found[number] - share * count) <= 1 + weighed * share + count / PATTERN_SAMPLES


def test_shares_are_what_is_dealt() -> None:
    stages = [WeighedSources(0, (3.0, 1.0, 0.0)), WeighedSources(700, (0.0, 1.0, 1.0)), WeighedSources(1000, (1, 0, 0))]
    order, deal = ShardedOrder(5, [SourceWindows((n,), 7) for n in (100, 40, 30)], stages, 4096), SourceDeal(stages)
    ranges = ((0, 1500), (0, 700), (650, 720), (699, 1001), (1200, 1201), (7, 7))
    together = Counter[int]()
    for start, stop in ranges:
        dealt = Counter(order.place(sample)[0] for sample in range(start, stop))
        assert list(deal.counts([(start, stop)])) == [dealt[source] for source in range(3)]
        together += dealt
    assert list(deal.counts(ranges)) == [together[source] for source in range(3)]
    assert list(deal.counts([])) == [0, 0, 0]
    assert list(deal.wanted([(600, 800)])) == [75, 75, 50]


def test_a_source_goes_on_where_it_was_when_a_stage_begins() -> None:
    sources = [SourceWindows((100,), 7), SourceWindows((50,), 7)]
    order = ShardedOrder(5, sources, [WeighedSources(0, (1.0, 1.0)), WeighedSources(60, (1.0, 0.0))], 4096)
    of_first = [place[2] for place in map(order.place, range(130)) if place[0] == 0]
    assert len(of_first) == 100
    assert sorted(of_first) == list(range(100))


def test_shares_within_a_tenth_of_a_percent_after_ten_million_tokens() -> None:
    weights = [0.6, 0.25, 0.1, 0.05]
    samples = 10_000_000 // 1024
    found = SourceDeal([WeighedSources(0, tuple(weights))]).counts([(0, samples)])
    assert all(abs(found[number] / samples - weight) <= 0.001 * weight for number, weight in enumerate(weights))


def test_a_mixture_without_weight_or_windows_is_refused() -> None:
    for windows, weights in (([[5], [5]], [0.0, 0.0]), ([[5], [0, 0]], [1.0, 1.0])):
        with pytest.raises(ValueError, match=r"window|positive"):
            order_of(windows, weights)
    for starts in ((1,), (0, 0), (0, 5, 4)):
        with pytest.raises(ValueError, match="begin at sample 0"):
            ShardedOrder(0, [SourceWindows((5,), 2)], [WeighedSources(start, (1.0,)) for start in starts], 100)
