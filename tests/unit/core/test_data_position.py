"""Data positions: no sample is skipped or assigned twice, and members that leave return their samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.data_position import (
    DataPosition,
    advance,
    drop_samples,
    first_lease_samples,
    genesis_position,
    sample_count,
)
from atoll.core.errors import PeerMisbehaved

PEERS = ["a", "b", "c", "d"]
rounds = st.lists(
    st.tuples(
        st.lists(st.sampled_from(PEERS), min_size=1, unique=True),
        st.dictionaries(st.sampled_from(PEERS), st.integers(0, 60)),
    ),
    max_size=12,
)


@given(st.integers(1, 50), st.integers(1, 40), rounds)
def test_every_sample_below_the_cursor_is_consumed_held_or_returned_exactly_once(first, lease, history):
    position = genesis_position(PEERS, first)
    consumed: list[int] = []
    for members, counts in history:
        for peer in members:
            held = [i for start, end in position.holdings.get(peer, ()) for i in range(start, end)]
            consumed += held[: counts.get(peer, 0)]
        counts = {peer: count for peer, count in counts.items() if peer in members}
        position = advance(position, members, counts, lease)
        assert set(position.holdings) == set(members)
        least = min(lease, first_lease_samples(lease, len(members)))
        assert all(sample_count(ranges) >= least for ranges in position.holdings.values())
    held = [i for ranges in position.holdings.values() for start, end in ranges for i in range(start, end)]
    returned = [i for start, end in position.returned for i in range(start, end)]
    assert sorted(consumed + held + returned) == list(range(position.cursor))


@given(rounds)
def test_a_position_survives_the_wire(history):
    position = genesis_position(PEERS, 10)
    for members, counts in history:
        position = advance(position, members, {p: c for p, c in counts.items() if p in members}, 5)
    back = DataPosition.from_proto(position.to_proto())
    assert (back.cursor, back.returned, dict(back.holdings)) == (
        position.cursor,
        position.returned,
        dict(position.holdings),
    )


def test_a_faster_member_gets_more_samples():
    position = advance(genesis_position(["fast", "slow"], 50), ["fast", "slow"], {"fast": 40, "slow": 2}, 40)
    assert sample_count(position.holdings["fast"]) == 160
    assert sample_count(position.holdings["slow"]) == 48


@given(st.integers(0, 2**63), st.integers(1, 100))
def test_a_false_count_cannot_use_up_the_corpus(claimed, lease):
    position = advance(genesis_position(["liar", "ann"], 50), ["liar", "ann"], {"liar": claimed, "ann": 5}, lease)
    assert position.cursor <= 100 + 5 * lease


def test_returned_samples_are_handed_out_first():
    position = genesis_position(["a", "b"], 10)
    position = advance(position, ["a"], {"a": 10}, 10)
    assert position.holdings["a"] == ((10, 50),)  # b's ten, then new ones
    assert position.returned == ()
    assert position.cursor == 50


def test_a_negative_count_is_refused():
    with pytest.raises(PeerMisbehaved):
        advance(genesis_position(["a"], 10), ["a"], {"a": -1}, 4)


def test_dropping_more_than_there_is_leaves_nothing():
    assert drop_samples(((0, 3), (5, 6)), 9) == ()


@pytest.mark.parametrize("members", [1, 4, 16, 64, 256])
def test_as_many_rounds_as_an_epoch_has_train_the_whole_corpus_once(members):
    """However many members share a small corpus: their leases cover a few rounds and not several epochs."""
    each, rounds_in_epoch = max(1, 1024 // members), 50
    round_samples, peers = each * members, [f"p{place:03d}" for place in range(members)]
    position = genesis_position(peers, first_lease_samples(round_samples, members))
    trained = []
    for _ in range(rounds_in_epoch):
        for peer in peers:
            held = [i for start, end in position.holdings[peer] for i in range(start, end)]
            assert len(held) >= each  # no member repeats samples
            trained += held[:each]
        position = advance(position, peers, dict.fromkeys(peers, each), round_samples)
    assert len(set(trained)) == len(trained)
    corpus = set(range(rounds_in_epoch * round_samples))
    assert len(corpus & set(trained)) >= 0.99 * len(corpus)
