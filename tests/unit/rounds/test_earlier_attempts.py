"""Nobody makes up what an earlier attempt had: a member remembers the attempts in which it took part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.node.rounds.earlier_attempts import EarlierAttempts
from atoll.v1 import manifest_pb2

ME, OTHER = "p0", "p1"
FIRST = RoundId("r", 1, 0, 1, 0)
KEPT = 16

Made = list[manifest_pb2.Contribution]


def contributions(**changes: int) -> Made:
    mine = {"weight": 100, "samples": 4} | changes
    return [
        manifest_pb2.Contribution(peer_id=ME, **mine),
        manifest_pb2.Contribution(peer_id=OTHER, weight=50, samples=2),
    ]


WITHOUT_ME: Made = contributions()[1:]


def attempt(number: int, plan_version: int = 1) -> RoundId:
    return replace(FIRST, attempt=number, plan_version=plan_version)


def test_the_attempt_whose_start_we_followed_had_exactly_that() -> None:
    earlier = EarlierAttempts(None)
    earlier.took_part(FIRST, contributions())
    assert not earlier.contradicts(ME, FIRST, contributions())
    for wrong in (contributions(weight=99), contributions(samples=5), WITHOUT_ME, contributions()[::-1]):
        assert earlier.contradicts(ME, FIRST, wrong)


def test_an_attempt_that_we_promised_may_have_had_anything() -> None:
    earlier = EarlierAttempts(None)
    earlier.promised(FIRST)
    assert not earlier.contradicts(ME, FIRST, contributions())
    assert not earlier.contradicts(ME, FIRST, WITHOUT_ME)


def test_an_attempt_of_which_we_know_nothing_was_without_us() -> None:
    earlier = EarlierAttempts(None)
    assert earlier.contradicts(ME, FIRST, contributions())
    assert not earlier.contradicts(ME, FIRST, WITHOUT_ME)
    assert not earlier.contradicts("p9", FIRST, contributions())


@pytest.mark.parametrize(("number", "contradicts"), [(2, False), (3, False), (4, True)])
def test_an_earlier_life_may_have_been_in_attempts_up_to_its_last_promise(number: int, contradicts: bool) -> None:
    earlier = EarlierAttempts(Ballot(1, 3))
    assert earlier.contradicts(ME, attempt(number), contributions()) is contradicts


def test_as_many_attempts_are_remembered_and_of_older_ones_nothing_is_said() -> None:
    earlier = EarlierAttempts(None)
    for number in range(KEPT):
        earlier.took_part(attempt(number), contributions(weight=number))
    assert earlier.contradicts(ME, attempt(0), contributions(weight=77))
    earlier.took_part(attempt(KEPT), contributions(weight=KEPT))
    assert not earlier.contradicts(ME, attempt(0), contributions(weight=77))
    assert earlier.contradicts(ME, attempt(1), contributions(weight=77))
    assert earlier.contradicts(ME, attempt(KEPT + 1), contributions())


def test_what_is_forgotten_is_everything_up_to_the_highest_attempt_that_was_dropped() -> None:
    """Under an older plan attempts have lower ballots, whatever their numbers."""
    earlier = EarlierAttempts(None)
    earlier.took_part(attempt(9), contributions())
    for number in range(KEPT):
        earlier.took_part(attempt(number, plan_version=0), contributions())
    assert not earlier.contradicts(ME, attempt(8), contributions())
    earlier.took_part(attempt(20), contributions())  # drops attempt 0 of the older plan, which is lower
    assert not earlier.contradicts(ME, attempt(9), contributions(weight=1))
    assert earlier.contradicts(ME, attempt(10), contributions())


def test_an_attempt_that_is_remembered_is_judged_by_that_though_it_is_older_than_our_life() -> None:
    earlier = EarlierAttempts(Ballot(1, 3))
    earlier.took_part(attempt(2), contributions())
    assert earlier.contradicts(ME, attempt(2), contributions(weight=1))
