"""Data positions: no sample is skipped or assigned twice, whatever members report, and leases follow their paces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.data_position import (
    FIRST_ROUNDS,
    FULL_ROUNDS,
    REFILL_ROUNDS,
    RETURN_ROUNDS,
    SHORT_PERCENT,
    DataPosition,
    Pace,
    SampleRange,
    advance,
    drop_samples,
    first_lease_samples,
    genesis_position,
    goes_on,
    sample_count,
    with_first_leases,
)
from atoll.core.errors import PeerMisbehaved
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

PEERS = ["a", "b", "c", "d"]
Round = tuple[list[str], dict[str, int]]
rounds = st.lists(
    st.tuples(
        st.lists(st.sampled_from(PEERS), min_size=1, unique=True),
        st.dictionaries(st.sampled_from(PEERS), st.integers(0, 60)),
    ),
    max_size=24,
)
epochs = st.sampled_from([0, 1, 37, 500, 100_000])
turns = st.integers(1, 3)


def numbers(ranges: Iterable[SampleRange]) -> list[int]:
    return [number for start, end in ranges for number in range(start, end)]


def held(position: DataPosition) -> list[int]:
    return [number for ranges in position.holdings.values() for number in numbers(ranges)]


def play(
    position: DataPosition, history: Sequence[Round], round_samples: int, turns: int
) -> Iterable[tuple[DataPosition, dict[str, int], DataPosition]]:
    """Each round: the position before it, its counts, the position after it. Whoever is new gets a first lease."""
    begun = len(PEERS)
    for members, counts in history:
        new = [peer for peer in members if peer not in position.holdings]
        began = [(begun, begun + place, peer) for place, peer in enumerate(new)]
        began += [(0, 0, peer) for peer in members if peer not in new]
        begun += len(new)
        before = with_first_leases(position, began, round_samples, turns)
        counts = {peer: count for peer, count in counts.items() if peer in members}
        position = advance(before, members, counts, round_samples, turns, begun)
        yield before, counts, position


@given(st.integers(1, 50), st.integers(1, 40), rounds, epochs, turns)
def test_every_sample_below_the_cursor_is_consumed_held_or_returned_exactly_once(first, lease, history, epoch, turns):
    position, consumed = genesis_position(PEERS, first, epoch), list[int]()
    for before, counts, after in play(position, history, lease, turns):
        for peer, count in counts.items():
            consumed += numbers(before.holdings[peer])[:count]
        for place in (before, after):
            gone = consumed if place is after else consumed[: len(consumed) - _consumed(before, counts)]
            assert sorted(gone + held(place) + numbers(place.returned)) == list(range(place.cursor))
        assert all(after.holdings.values())  # nobody is without samples


def _consumed(before: DataPosition, counts: Mapping[str, int]) -> int:
    return sum(min(count, sample_count(before.holdings[peer])) for peer, count in counts.items())


@given(st.integers(1, 50), st.integers(1, 40), rounds, epochs, turns)
def test_a_lease_is_only_consumed_from_its_start_and_extended_at_its_end(first, lease, history, epoch, turns):
    """So a member that trained on meanwhile trains nothing twice."""
    for before, counts, after in play(genesis_position(PEERS, first, epoch), history, lease, turns):
        for peer, ranges in after.holdings.items():
            if before.pace(peer).uncounted < RETURN_ROUNDS * turns:
                assert goes_on(before.holdings[peer], counts.get(peer, 0), ranges)


@given(st.integers(1, 50), st.integers(1, 40), rounds, epochs)
def test_a_round_adds_few_ranges(first, lease, history, epoch):
    def ranges(position: DataPosition) -> int:
        return len(position.returned) + sum(map(len, position.holdings.values()))

    for before, _, after in play(genesis_position(PEERS, first, epoch), history, lease, 1):
        assert ranges(after) <= ranges(before) + 2 * len(after.holdings) + 1
        assert list(after.returned) == sorted(after.returned)
        assert all(one[1] < other[0] for one, other in zip(after.returned, after.returned[1:], strict=False))


@given(rounds, epochs)
def test_a_position_survives_the_wire(history, epoch):
    position = genesis_position(PEERS, 10, epoch)
    for _, _, after in play(position, history, 5, 1):
        position = after
    assert DataPosition.from_proto(position.to_proto()) == position


def test_a_position_of_an_earlier_release_is_read_and_goes_on():
    old = manifest_pb2.DataPosition(
        cursor=300,
        returned=[pb.SampleRange(start=90, end=100)],
        holdings=[
            manifest_pb2.DataHolding(peer_id="a", ranges=[pb.SampleRange(start=0, end=90)]),
            manifest_pb2.DataHolding(peer_id="b", ranges=[pb.SampleRange(start=100, end=300)]),
        ],
    )
    position = advance(DataPosition.from_proto(old), ["a", "b"], {"a": 40, "b": 50}, 90)
    assert position.holdings == {"a": ((40, 100), (300, 480)), "b": ((150, 300),)}  # b has three rounds left
    assert position.paces == {"a": Pace(40), "b": Pace(50)}


@given(st.integers(0, 2**63), st.integers(0, 60), st.integers(1, 100), epochs)
def test_a_false_count_moves_nothing_of_others(claimed, true, lease, epoch):
    before = replace(genesis_position(["ann", "liar"], 50, epoch), paces={"ann": Pace(5), "liar": Pace(5)})
    lied, told = (advance(before, ["ann", "liar"], {"liar": count, "ann": 5}, lease) for count in (claimed, true))
    assert lied.paces["ann"] == told.paces["ann"]
    for after in (lied, told):
        assert goes_on(before.holdings["ann"], 5, after.holdings["ann"])
        assert sample_count(after.holdings["liar"]) <= max(50, FULL_ROUNDS * lease)
    fewest = 50 - 5 if lease >= 15 else 0
    assert sample_count(lied.holdings["ann"]) >= fewest


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=12), st.integers(1, 100))
def test_false_counts_cannot_use_up_the_corpus(claims, lease):
    position = genesis_position(["liar", "ann"], 50)
    for claimed in claims:
        before = position.cursor
        position = advance(position, ["liar", "ann"], {"liar": claimed, "ann": 5}, lease)
        assert position.cursor - before <= 2 * FULL_ROUNDS * lease


def test_a_negative_count_is_refused():
    with pytest.raises(PeerMisbehaved):
        advance(genesis_position(["a"], 10), ["a"], {"a": -1}, 4)


def test_dropping_more_than_there_is_leaves_nothing():
    assert drop_samples(((0, 3), (5, 6)), 9) == ()


@pytest.mark.parametrize(
    ("before", "consumed", "now", "answer"),
    [
        (((0, 10),), 4, ((4, 10),), True),
        (((0, 10),), 4, ((4, 8), (8, 10), (20, 30)), True),
        (((0, 10),), 4, ((5, 10),), False),
        (((0, 10),), 4, ((4, 9),), False),
        (((0, 10),), 10, ((50, 60),), True),
        ((), 0, (), True),
        (((0, 10), (20, 30)), 12, ((22, 30), (40, 50)), True),
        (((0, 10), (20, 30)), 12, ((23, 31),), False),
    ],
)
def test_who_goes_on(before, consumed, now, answer):
    assert goes_on(before, consumed, now) is answer


# --- lengths of leases ---------------------------------------------------------------------------------------


def steady(pace: int, members: int = 4, epoch: int = 0) -> DataPosition:
    peers = PEERS[:members]
    return replace(genesis_position(peers, FULL_ROUNDS * pace, epoch), paces=dict.fromkeys(peers, Pace(pace)))


def test_leases_are_refilled_seldom_and_then_by_several_rounds():
    position, refills = steady(10), []
    for _ in range(12):
        after = advance(position, PEERS, dict.fromkeys(PEERS, 10), 40)
        refills.append(sample_count(after.holdings["a"]) - sample_count(position.holdings["a"]) + 10)
        position = after
    assert refills == [0, 0, 0, 40] * 3  # below three rounds it gets what makes six
    assert sample_count(position.holdings["a"]) == FULL_ROUNDS * 10


def test_a_lease_lasts_as_many_rounds_more_as_there_are_cuts():
    once, thrice = (advance(steady(10), PEERS, dict.fromkeys(PEERS, 10), 40, turns) for turns in (1, 3))
    assert sample_count(once.holdings["a"]) == FULL_ROUNDS * 10 - 10
    assert sample_count(thrice.holdings["a"]) == 3 * FULL_ROUNDS * 10


def test_a_faster_member_gets_more_samples():
    position = genesis_position(["fast", "slow"], 50)
    position = advance(position, ["fast", "slow"], {"fast": 40, "slow": 2}, 42)
    assert sample_count(position.holdings["fast"]) == FULL_ROUNDS * 40
    assert sample_count(position.holdings["slow"]) == 48


@pytest.mark.parametrize(
    ("pace", "used", "expected"),
    [
        (Pace(), 20, Pace(20)),
        (Pace(10), 20, Pace(15)),
        (Pace(11), 20, Pace(16)),  # rounded up
        (Pace(10), 0, Pace(10, 1)),
        (Pace(10, 2), 0, Pace(10, 3)),
        (Pace(20, 1), 40, Pace(20)),  # of two rounds
        (Pace(20, 1), 41, Pace(21)),
        (Pace(40), 90, Pace(65)),
        (Pace(40), 100, Pace(120)),  # all that it held: it may be twice as fast, or more
        (Pace(), 100, Pace(200)),
    ],
)
def test_a_pace_is_the_mean_of_the_last_round_and_those_before(pace, used, expected):
    position = replace(genesis_position(["a", "b"], 100), paces={"a": pace, "b": Pace(10)})
    assert advance(position, ["a", "b"], {"a": used, "b": 10}, 1000).paces["a"] == expected


def test_no_pace_is_above_that_of_the_whole_swarm():
    assert advance(genesis_position(["a"], 1000), ["a"], {"a": 1000}, 70).paces["a"] == Pace(70)


def test_a_member_that_rounds_do_not_count_gets_more_for_what_it_may_have_trained():
    position, got = steady(10), []
    for _ in range(RETURN_ROUNDS):
        position = advance(position, PEERS, dict.fromkeys(PEERS[1:], 10), 40)
        got.append(sample_count(position.holdings["a"]))
    assert got == [60, 60, 60, 100, 100, 100, 100, 140]


def test_a_member_that_no_round_counts_for_long_loses_its_lease_for_a_first_one():
    position = steady(10)
    for _ in range(RETURN_ROUNDS):
        position = advance(position, PEERS, dict.fromkeys(PEERS[1:], 10), 40)
    lease = position.holdings["a"]
    assert position.pace("a") == Pace(10, RETURN_ROUNDS)
    after = advance(position, PEERS, dict.fromkeys(PEERS[1:], 10), 40)
    assert after.pace("a") == Pace()
    assert sample_count(after.holdings["a"]) == FIRST_ROUNDS * 10
    others = {number for peer in PEERS[1:] for number in numbers(after.holdings[peer])}
    assert set(numbers(lease)) <= others | set(numbers(after.returned)) | set(numbers(after.holdings["a"]))
    assert not goes_on(lease, 0, after.holdings["a"])


def test_returned_samples_are_handed_out_first_to_the_member_with_the_least():
    position = DataPosition(
        100, ((60, 65), (70, 80)), {"a": ((0, 12),), "b": ((20, 31),)}, {"a": Pace(10), "b": Pace(10)}
    )
    after = advance(position, ["a", "b"], {"a": 10, "b": 10}, 20)
    assert after.holdings["b"] == ((30, 31), (60, 65), (70, 80), (100, 144))
    assert after.holdings["a"] == ((10, 12), (144, 202))
    assert (after.returned, after.cursor) == ((), 202)


def test_a_returned_range_goes_to_the_member_whose_samples_it_follows():
    position = DataPosition(
        1000, ((100, 200), (512, 570)), {"a": ((500, 512),), "b": ((20, 80),)}, {"a": Pace(10), "b": Pace(10)}
    )
    after = advance(position, ["a", "b"], {"a": 10, "b": 10}, 20)
    assert after.holdings["a"] == ((510, 570),)
    assert after.returned == ((100, 200),)


def test_ranges_of_members_that_left_are_merged():
    position = DataPosition(90, (), {"a": ((0, 60),), "b": ((60, 75),), "c": ((75, 90),)}, {"a": Pace(10)})
    after = advance(position, ["a"], {"a": 10}, 20)
    assert (after.returned, after.cursor) == ((), 60)
    assert after.holdings == {"a": ((10, 60),)}


# --- the end of an epoch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds_left", "full"),
    [(20, 60), (12, 60), (10, 50), (6, 30), (4, 20), (3, 18), (1, 18)],
)
def test_leases_shrink_to_half_of_what_is_left_of_an_epoch(rounds_left, full):
    left = rounds_left * 40
    position = DataPosition(1000, (), dict.fromkeys(PEERS, ()), dict.fromkeys(PEERS, Pace(10)), 1000 + left)
    after = advance(position, PEERS, {}, 40)
    assert {sample_count(ranges) for ranges in after.holdings.values()} == {full}
    assert -(-SHORT_PERCENT * 10 // 100) == 18


@pytest.mark.parametrize("epoch", [1, 2, 5])
def test_members_share_the_last_samples_of_an_epoch_in_proportion_to_their_paces(epoch):
    end, paces = 1000 * epoch, {"a": Pace(30), "b": Pace(10)}
    position = DataPosition(end - 40, (), {"a": (), "b": ()}, paces, 1000)
    after = advance(position, ["a", "b"], {}, 40)
    of_epoch = {peer: sum(n < end for n in numbers(ranges)) for peer, ranges in after.holdings.items()}
    assert of_epoch == {"a": 30, "b": 10}
    assert sample_count(after.holdings["a"]) == -(-SHORT_PERCENT * 30 // 100)
    assert after.cursor == end - 40 + sum(-(-SHORT_PERCENT * pace.samples // 100) for pace in paces.values())


def test_a_returned_range_that_crosses_the_end_of_an_epoch_is_shared_like_two():
    position = DataPosition(1040, ((960, 1040),), {"a": (), "b": ()}, {"a": Pace(30), "b": Pace(10)}, 1000)
    after = advance(position, ["a", "b"], {}, 40)
    assert after.holdings == {"a": ((960, 990), (1000, 1023)), "b": ((990, 1000), (1023, 1031))}
    assert (after.cursor, after.returned) == (1031, ())


def test_no_sample_of_an_epoch_is_left_over_when_members_share_its_last():
    peers = ["a", "b", "c"]
    position = DataPosition(969, (), dict.fromkeys(peers, ()), dict.fromkeys(peers, Pace(10)), 1000)
    after = advance(position, peers, {}, 30)
    assert sum(n < 1000 for n in held(after)) == 31


def test_the_last_leases_of_an_epoch_last_as_many_rounds_more_as_there_are_cuts():
    position = DataPosition(990, (), {"a": (), "b": ()}, {"a": Pace(10), "b": Pace(10)}, 1000)
    once, twice = (advance(position, ["a", "b"], {}, 20, turns) for turns in (1, 2))
    assert sample_count(once.holdings["a"]) == -(-SHORT_PERCENT * 10 // 100)
    assert sample_count(twice.holdings["a"]) == -(-SHORT_PERCENT * 2 * 10 // 100)


def test_a_member_at_the_cursor_takes_returned_samples_first():
    position = DataPosition(500, ((100, 120),), {"a": ((490, 500),)}, {"a": Pace(10)}, 100_000)
    after = advance(position, ["a"], {"a": 5}, 20)
    assert after.holdings["a"][:2] == ((495, 500), (100, 120))


def test_false_paces_do_not_bring_the_end_of_an_epoch_nearer_for_all():
    """The swarm is taken to consume at most `round_samples` in a round."""
    paces = {"a": Pace(100), "b": Pace(100)}
    position = DataPosition(1200, (), dict.fromkeys(PEERS, ()), paces, 2000)
    after = advance(position, PEERS, {}, 100)
    assert sample_count(after.holdings["a"]) == 800 * 100 // (2 * 100)


def test_a_member_gets_less_of_the_last_samples_if_it_holds_some_already():
    holdings: Mapping[str, tuple[SampleRange, ...]] = {"a": ((900, 925),), "b": ()}
    position = DataPosition(1000, ((925, 980),), holdings, {"a": Pace(20), "b": Pace(20)}, 1000)
    after = advance(position, ["a", "b"], {}, 40)
    of_epoch = {peer: sum(n < 1000 for n in numbers(ranges)) for peer, ranges in after.holdings.items()}
    assert of_epoch == {"a": (25 + 55) // 2, "b": -(-SHORT_PERCENT * 20 // 100)}


@pytest.mark.parametrize("members", [1, 4, 16, 64, 256])
def test_as_many_rounds_as_an_epoch_has_train_the_whole_corpus_once(members):
    """However many members share a small corpus: their leases cover a few rounds and not several epochs."""
    each, rounds_in_epoch = max(1, 1024 // members), 50
    round_samples, peers = each * members, [f"p{place:03d}" for place in range(members)]
    corpus = rounds_in_epoch * round_samples
    position = genesis_position(peers, first_lease_samples(round_samples, members), corpus)
    trained = []
    for _ in range(rounds_in_epoch):
        for peer in peers:
            mine = numbers(position.holdings[peer])
            assert len(mine) >= each  # no member repeats samples
            trained += mine[:each]
        position = advance(position, peers, dict.fromkeys(peers, each), round_samples)
    assert sorted(trained) == list(range(corpus))


# --- first leases ---------------------------------------------------------------------------------------------

HEAD = DataPosition(1000, ((50, 80),), {"a": ((0, 50),), "b": ((80, 1000),)}, {"a": Pace(8), "b": Pace(12)}, 0, 7)


@given(st.sets(st.integers(7, 20), min_size=1), st.data())
def test_no_later_plan_moves_a_first_lease_whoever_leaves(begun, data):
    began = [(2, number, f"n{number}") for number in sorted(begun)]
    stay = data.draw(st.sets(st.sampled_from(sorted(begun))))
    everybody = with_first_leases(HEAD, began, 100)
    fewer = with_first_leases(HEAD, [item for item in began if item[1] in stay], 100)
    assert fewer.holdings == {
        peer: ranges for peer, ranges in everybody.holdings.items() if peer in HEAD.holdings or int(peer[1:]) in stay
    }
    for position in (everybody, fewer):
        assert sorted(held(position) + numbers(position.returned)) == list(range(position.cursor))
        assert {sample_count(position.holdings[f"n{n}"]) for n in stay} <= {FIRST_ROUNDS * 10}


def test_first_leases_begin_with_returned_samples():
    position = with_first_leases(HEAD, [(2, 8, "m"), (2, 7, "n"), (1, 0, "a")], 100)
    assert position.holdings["n"] == ((50, 80), (1000, 1010))
    assert position.holdings["m"] == ((1010, 1050),)
    assert (position.cursor, position.returned) == (1050, ())


def test_samples_of_a_newcomer_that_is_gone_wait_for_others():
    position = with_first_leases(HEAD, [(2, 8, "m")], 100)
    assert position.holdings["m"] == ((1010, 1050),)
    assert (position.cursor, position.returned) == (1050, ((50, 80), (1000, 1010)))


def test_without_newcomers_nothing_moves():
    assert with_first_leases(HEAD, [(1, 0, "a"), (1, 1, "b")], 100) is HEAD


@pytest.mark.parametrize(
    ("head", "numbers_of"),
    [
        (replace(HEAD, routes_begun=0), {"n": 9, "m": 12}),  # an older plan made it
        (HEAD, {"n": 6, "m": 12}),
        (HEAD, {"n": 9, "m": 9}),
    ],
)
def test_first_leases_follow_one_another_where_plans_do_not_count_routes(head, numbers_of):
    position = with_first_leases(head, [(3, numbers_of["m"], "m"), (2, numbers_of["n"], "n")], 100)
    assert numbers(position.holdings["n"])[0] == 50
    assert numbers(position.holdings["m"])[0] == 1010


def test_a_first_lease_is_at_most_a_round():
    assert sample_count(with_first_leases(HEAD, [(2, 7, "n")], 33).holdings["n"]) == 33


def test_a_first_lease_is_short_at_the_end_of_an_epoch():
    head = replace(HEAD, epoch_samples=60)
    assert sample_count(with_first_leases(head, [(2, 7, "n")], 100).holdings["n"]) == -(-SHORT_PERCENT * 10 // 100)


def test_false_paces_do_not_make_first_leases_longer():
    peers = [f"p{place}" for place in range(8)]
    head = DataPosition(1000, (), dict.fromkeys(peers, ((0, 1),)), dict.fromkeys(peers, Pace(100)))
    assert sample_count(with_first_leases(head, [(2, 9, "n")], 100).holdings["n"]) == FIRST_ROUNDS * (100 // 8)


def test_a_round_under_an_older_plan_begins_no_route_again():
    assert advance(HEAD, ["a", "b"], {}, 20, routes_begun=9).routes_begun == 9
    assert advance(HEAD, ["a", "b"], {}, 20, routes_begun=3).routes_begun == HEAD.routes_begun


def test_the_first_lease_of_a_run_is_a_share_of_some_rounds():
    assert first_lease_samples(30, 4) == FIRST_ROUNDS * 30 // 4
    assert first_lease_samples(31, 4, 2) == 2 * FIRST_ROUNDS * 31 // 4
    assert first_lease_samples(1, 1000) == 1
    assert first_lease_samples(5, 0) == FIRST_ROUNDS * 5
    assert REFILL_ROUNDS < FULL_ROUNDS
