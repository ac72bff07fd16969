"""The order of samples and the ranges that a node consumes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.data_position import advance, genesis_position
from atoll.node.data.sample_order import SampleOrder
from atoll.node.training.sample_feed import SampleFeed

ranges_lists = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=5
)


@settings(max_examples=50)
@given(st.integers(0, 2**63 - 1), st.integers(1, 300), st.integers(0, 1000))
def test_every_epoch_is_a_permutation(seed: int, samples: int, epoch: int) -> None:
    order = SampleOrder(seed, samples)
    assert sorted(order.window(epoch * samples + i) for i in range(samples)) == list(range(samples))


def test_the_order_is_the_same_on_every_machine_and_differs_by_seed_and_epoch() -> None:
    order = SampleOrder(7, 10)
    first, second = [order.window(i) for i in range(10)], [order.window(i) for i in range(10, 20)]
    assert first == [3, 2, 0, 8, 1, 5, 6, 7, 9, 4]
    assert second == [2, 3, 0, 9, 4, 5, 8, 6, 7, 1]
    assert [SampleOrder(8, 10).window(i) for i in range(10)] != first


def test_the_order_does_not_depend_on_the_order_of_queries() -> None:
    forwards, backwards = SampleOrder(3, 17), SampleOrder(3, 17)
    assert [forwards.window(i) for i in range(60)] == [backwards.window(i) for i in reversed(range(60))][::-1]


@given(ranges_lists, st.integers(0, 20), st.lists(st.integers(1, 7), max_size=6))
def test_a_feed_reads_its_ranges_in_order_after_the_skip(
    ranges: list[tuple[int, int]], skip: int, counts: list[int]
) -> None:
    numbers = [n for start, end in ranges for n in range(start, end)]
    feed = SampleFeed(ranges, skip)
    assert feed.empty == (not numbers)
    if feed.empty:
        return
    taken = [feed.take(count) for count in counts]
    read = [n for one in taken for n in one.samples]
    expected = numbers[skip:] + numbers * (1 + len(read) // len(numbers))
    assert read == expected[: len(read)]
    assert sum(one.fresh for one in taken) == min(len(read), max(0, len(numbers) - skip))
    assert [len(one.samples) for one in taken] == counts


def test_an_exhausted_feed_repeats_its_ranges_and_counts_them_as_repeated() -> None:
    feed = SampleFeed([(10, 13)])
    first, second = feed.take(2), feed.take(3)
    assert (first.samples, first.repeated) == ((10, 11), 0)
    assert (second.samples, second.fresh, second.repeated) == ((12, 10, 11), 1, 2)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_feeds_driven_by_manifests_train_each_sample_once(rounds: list[tuple[int, int]]) -> None:
    """Two members, rounds with some samples before each snapshot and some during the exchange."""
    members = ["a", "b"]
    position = genesis_position(members, 4)
    feeds = {peer: SampleFeed(position.holdings[peer]) for peer in members}
    after = dict.fromkeys(members, 0)
    seen: list[int] = []

    def train(peer: str, count: int) -> int:
        taken = feeds[peer].take(count)
        seen.extend(taken.samples[: taken.fresh])
        return taken.fresh

    for before, during in rounds:
        consumed = {peer: after[peer] + train(peer, before) for peer in members}
        after = {peer: train(peer, during) if during else 0 for peer in members}
        position = advance(position, members, consumed, round_samples=4)
        feeds = {peer: SampleFeed(position.holdings[peer], skip=after[peer]) for peer in members}
    assert len(seen) == len(set(seen))
    held = {n for peer in members for start, end in position.holdings[peer] for n in range(start, end)}
    assert set(range(position.cursor)) == set(seen) | held
