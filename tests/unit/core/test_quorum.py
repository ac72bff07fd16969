"""Seats and votes: two majorities share a seat, and no attempt proposes a result beside one that may be committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core import quorum
from atoll.core.quorum import (
    COORDINATOR,
    MAX_SEATS,
    Ballot,
    Electorate,
    LastVote,
    Promised,
    VoteRecord,
    must_propose,
    next_seats,
)
from atoll.v1 import dataplane_pb2 as dp

PEERS = tuple(f"p{number}" for number in range(10))
NAMES = (*PEERS, COORDINATOR)
SETS = st.frozensets(st.sampled_from(NAMES))


@given(st.frozensets(st.sampled_from(NAMES), max_size=8), SETS, SETS)
def test_two_majorities_share_a_seat(seats: frozenset[str], some: frozenset[str], others: frozenset[str]) -> None:
    electorate = Electorate(seats)
    if electorate.decides(some) and electorate.decides(others):
        assert some & others & seats
    assert not (electorate.decides(some) and electorate.decides(seats - some))


@given(st.frozensets(st.sampled_from(NAMES), max_size=8), st.lists(st.sampled_from(NAMES)))
def test_votes_count_once_and_only_with_a_seat(seats: frozenset[str], votes: list[str]) -> None:
    assert Electorate(seats).decides(votes) == (len(seats & set(votes)) > len(seats) / 2)


# --- who gets a seat -----------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(NAMES), unique=True),
    st.frozensets(st.sampled_from(PEERS), min_size=1),
    st.permutations(PEERS),
)
def test_who_stays_keeps_its_seat_and_the_first_in_rank_get_the_others(
    before: list[str], present: frozenset[str], ranked: list[str]
) -> None:
    seats = next_seats(before, present, ranked)
    members = [peer for peer in seats if peer != COORDINATOR]
    assert len(seats) % 2 == 1
    assert (seats[-1] == COORDINATOR) == (len(members) % 2 == 0) == (COORDINATOR in seats)
    assert set(members) <= present
    assert len(set(members)) == len(members) == min(MAX_SEATS, len(present))
    stayed = [peer for peer in before if peer in present]
    kept = stayed[:MAX_SEATS]
    assert members[: len(kept)] == kept
    assert members[len(kept) :] == [peer for peer in ranked if peer in present - set(kept)][: len(members) - len(kept)]
    assert next_seats(seats, present, ranked) == seats


@pytest.mark.parametrize(
    ("members", "seats"),
    [
        (1, PEERS[:1]),
        (2, (*PEERS[:2], COORDINATOR)),
        (6, (*PEERS[:6], COORDINATOR)),
        (7, PEERS[:7]),
        (10, PEERS[:7]),
    ],
)
def test_up_to_seven_members_have_seats_and_the_coordinator_makes_their_number_odd(
    members: int, seats: tuple[str, ...]
) -> None:
    assert next_seats((), PEERS[:members], PEERS) == seats


def test_nobody_present_is_an_error() -> None:
    with pytest.raises(ValueError, match="present"):
        next_seats(PEERS, (), PEERS)


# --- what an attempt must propose ------------------------------------------------------------------------


@cache
def vote(attempt: int, result: int) -> LastVote:
    """For this result in this attempt. Proposals of one result may show different attestations."""
    proposal = dp.Proposal(payload=b"result %d" % result)
    proposal.attestations.add(signature=b"%d" % attempt)
    return LastVote(Ballot(1, attempt), proposal.SerializeToString())


@dataclass(frozen=True)
class Attempt:
    """Who promised, told its last vote then and votes in no earlier attempt from there on; and who voted."""

    promised: frozenset[str]
    voted: frozenset[str]


History = tuple[Attempt, ...]


def subsets(seats: tuple[str, ...], least: int = 0) -> list[frozenset[str]]:
    sizes = range(least, len(seats) + 1)
    return [frozenset(chosen) for size in sizes for chosen in combinations(seats, size)]


def told(
    seats: tuple[str, ...], attempts: History, results: list[int], promised: frozenset[str]
) -> list[LastVote | None]:
    """The last votes of those who promise the attempt after `attempts`, by seat; of others `results` says nothing."""
    last: dict[str, LastVote | None] = dict.fromkeys(seats)
    for number, (attempt, result) in enumerate(zip(attempts, results, strict=True)):
        last |= dict.fromkeys(attempt.voted, vote(number, result))
    return [last[seat] for seat in seats if seat in promised]


def proposed(seats: tuple[str, ...], attempts: History, results: list[int], promised: frozenset[str]) -> int | None:
    """The number of the result that this attempt must propose."""
    names = [seat for seat in seats if seat in promised]
    answers = dict(zip(names, told(seats, attempts, results, promised), strict=True))
    found = must_propose(Electorate(frozenset(seats)), answers)
    return None if found is None else int(found.payload.split()[1])


def results_of(seats: tuple[str, ...], attempts: History) -> list[int]:
    """What each attempt proposes: what it must, or a result of its own."""
    results: list[int] = []
    for number, attempt in enumerate(attempts):
        must = proposed(seats, attempts[:number], results, attempt.promised)
        results.append(number if must is None else must)
    return results


def committed(seats: tuple[str, ...], attempts: History, results: list[int]) -> set[int]:
    majority = len(seats) // 2 + 1
    return {result for attempt, result in zip(attempts, results, strict=True) if len(attempt.voted) >= majority}


def all_histories(seats: tuple[str, ...], attempts: int) -> Iterator[History]:
    everyone, majorities = subsets(seats), subsets(seats, len(seats) // 2 + 1)
    one = [Attempt(promised, voted) for promised, voted in product(majorities, everyone)]
    return product([Attempt(frozenset(seats), voted) for voted in everyone], *[one] * (attempts - 1))


def test_no_history_of_three_seats_and_three_attempts_commits_two_results() -> None:
    seats = PEERS[:3]
    for attempts in all_histories(seats, 3):
        assert len(committed(seats, attempts, results_of(seats, attempts))) <= 1, attempts


@st.composite
def histories(draw: st.DrawFn) -> tuple[tuple[str, ...], History]:
    seats = PEERS[: draw(st.sampled_from([3, 5, 7]))]
    majority = len(seats) // 2 + 1
    promised, voted = st.frozensets(st.sampled_from(seats), min_size=majority), st.frozensets(st.sampled_from(seats))
    return seats, tuple(draw(st.lists(st.builds(Attempt, promised, voted), min_size=2, max_size=5)))


@given(histories())
def test_no_history_commits_two_results(drawn: tuple[tuple[str, ...], History]) -> None:
    seats, attempts = drawn
    assert len(committed(seats, attempts, results_of(seats, attempts))) <= 1


def test_a_committed_result_whose_voters_voted_for_it_again_is_proposed() -> None:
    """Three of five committed it; a later attempt proposed it again, and reached one of them only."""
    seats = PEERS[:5]
    a, b, c, d, _ = seats
    promised = {a: vote(1, 0), b: vote(0, 0), c: vote(0, 0), d: None}
    assert must_propose(Electorate(frozenset(seats)), promised) is promised[a]


@pytest.mark.parametrize("size", [3, 5])
def test_exactly_what_may_be_committed_is_proposed_again(size: int) -> None:
    """For everything that two attempts can leave behind, and all that a third can hear of it."""
    seats = PEERS[:size]
    possible: dict[tuple[frozenset[str], tuple[LastVote | None, ...]], set[int]] = defaultdict(set)
    must: dict[tuple[frozenset[str], tuple[LastVote | None, ...]], int | None] = {}
    for attempts in all_histories(seats, 2):
        results = results_of(seats, attempts)
        for promised in subsets(seats, size // 2 + 1):
            heard = (promised, tuple(told(seats, attempts, results, promised)))
            possible[heard] |= committed(seats, attempts, results)
            if heard not in must:
                must[heard] = proposed(seats, attempts, results, promised)
    for heard, result in must.items():
        assert possible[heard] == (set() if result is None else {result}), heard


def test_a_record_tells_its_promise_and_whether_it_voted_there() -> None:
    first, second = Ballot(1, 2), Ballot(1, 3)
    assert VoteRecord(7, b"head", first).newest == Promised(7, first, voted=False)
    assert VoteRecord(7, b"head", first, LastVote(first, b"")).newest == Promised(7, first, voted=True)
    assert VoteRecord(7, b"head", second, LastVote(first, b"")).newest == Promised(7, second, voted=False)


def test_marks_are_as_long_as_the_messages_say_and_four_are_kept() -> None:
    assert (quorum.MARK_BYTES, quorum.MARKS_KEPT) == (8, 4)
