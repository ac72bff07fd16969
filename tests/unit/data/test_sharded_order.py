"""Order of samples of a corpus of shards: once an epoch, close together, and in the right mixture."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.data.sample_order import GROUP_BYTES, STRETCH_BYTES, ShardedOrder, WeighedSources


def order_of(
    windows: list[int], weights: list[float] | None = None, seed: int = 1, size: int = 1 << 14
) -> ShardedOrder:
    weights = weights or [float(count) for count in windows]
    return ShardedOrder(seed, windows, [WeighedSources(0, tuple(weights))], size)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**63), st.sampled_from([64, 1 << 12, 1 << 14, 1 << 16, 1 << 19, 1 << 22]))
def test_every_window_comes_once_in_each_epoch(windows: int, seed: int, size: int) -> None:
    order = order_of([windows], seed=seed, size=size)
    for epoch in range(3):
        places = [order.place(sample) for sample in range(epoch * windows, (epoch + 1) * windows)]
        assert sorted(places) == [(0, window) for window in range(windows)]


def test_epochs_and_seeds_have_other_orders() -> None:
    size = STRETCH_BYTES // 8
    first, second = ([order_of([800], seed=3, size=size).place(n) for n in range(s, s + 800)] for s in (0, 800))
    assert first != second
    assert first != [order_of([800], seed=4, size=size).place(n) for n in range(800)]
    assert first != sorted(first)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40_000), st.integers(1, 2000), st.sampled_from([1 << 10, 1 << 12, 1 << 14]))
def test_a_run_of_samples_lies_in_few_bytes(first: int, count: int, size: int) -> None:
    """What a lease touches is hardly more than what it trains: a group at each end, and one where a stretch ends."""
    order = order_of([50_000], size=size)
    per_group, per_stretch = GROUP_BYTES // size, STRETCH_BYTES // size
    windows = [order.place(sample)[1] for sample in range(first, first + count)]
    groups = {window // per_group for window in windows}
    assert len(groups) <= -(-count // per_group) + 1 + count // per_stretch + 1
    assert len({window // per_stretch for window in windows}) <= count // per_stretch + 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=5), st.integers(0, 100_000), st.integers(1, 20_000))
def test_each_source_has_its_share_of_any_run_of_samples(weights: list[float], first: int, count: int) -> None:
    if not sum(weights) > 1e-3:
        weights[0] = 1.0
    order = order_of([1000] * len(weights), weights)
    found = order.shares(first, first + count)
    assert sum(found.values()) == count
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found.get(number, 0) - share * count) <= 2 + count / 65536


def test_shares_are_what_is_dealt() -> None:
    stages = [WeighedSources(0, (3.0, 1.0, 0.0)), WeighedSources(700, (0.0, 1.0, 1.0)), WeighedSources(1000, (1, 0, 0))]
    order = ShardedOrder(5, [100, 40, 30], stages, 4096)
    for start, stop in ((0, 1500), (0, 700), (650, 720), (699, 1001), (1200, 1201)):
        dealt = Counter(order.place(sample)[0] for sample in range(start, stop))
        assert order.shares(start, stop) == dict(dealt)


def test_a_source_goes_on_where_it_was_when_a_stage_begins() -> None:
    order = ShardedOrder(5, [100, 50], [WeighedSources(0, (1.0, 1.0)), WeighedSources(60, (1.0, 0.0))], 4096)
    of_first = [place[1] for place in map(order.place, range(130)) if place[0] == 0]
    assert len(of_first) == 100
    assert sorted(of_first) == list(range(100))


def test_shares_within_a_tenth_of_a_percent_after_ten_million_tokens() -> None:
    weights = [0.6, 0.25, 0.1, 0.05]
    samples = 10_000_000 // 1024
    found = order_of([10**6] * 4, weights, size=2048).shares(0, samples)
    assert all(abs(found[number] / samples - weight) <= 0.001 * weight for number, weight in enumerate(weights))


def test_a_mixture_without_weight_or_windows_is_refused() -> None:
    for windows, weights in (([5, 5], [0.0, 0.0]), ([5, 0], [1.0, 1.0])):
        with pytest.raises(ValueError, match=r"window|positive"):
            order_of(windows, weights)
    for starts in ((1,), (0, 0), (0, 5, 4)):
        with pytest.raises(ValueError, match="begin at sample 0"):
            ShardedOrder(0, [5], [WeighedSources(start, (1.0,)) for start in starts], 100)
