"""What openers conclude from disputes, and which Starts members accept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine_plans import POLICY, make_plan

from atoll.core.errors import PeerMisbehaved
from atoll.core.round_id import RoundId
from atoll.node.exchange.auditor import Dispute
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds.decide import build_start, check_start
from atoll.node.rounds.suspicions import SUSPECTED_ROUNDS, Suspicions
from atoll.v1 import dataplane_pb2 as dp

PEERS = ["p0", "p1", "p2", "p3", "p4"]
NUMBER = RoundId("r", 1, 0, 1, 0)


def disputes(*pairs: tuple[str, str | None]) -> list[Dispute]:
    return [Dispute(reducer, contributor, "it differs") for reducer, contributor in pairs]


def test_a_reducer_that_several_contradict_sums_no_more_for_some_rounds() -> None:
    suspicions = Suspicions()
    suspicions.note(disputes(("a", None)), 10)
    assert suspicions.poor_reducers(11) == {"a"}
    assert suspicions.liars(11) == frozenset()
    assert suspicions.poor_reducers(10 + SUSPECTED_ROUNDS) == frozenset()


def test_one_dispute_takes_the_reducing_from_the_reducer_and_nothing_from_the_contributor() -> None:
    suspicions = Suspicions()
    suspicions.note(disputes(("a", "x")), 10)
    assert suspicions.poor_reducers(10) == {"a"}
    assert suspicions.liars(10) == frozenset()


def test_a_contributor_that_contradicts_two_reducers_is_left_out_and_they_sum_again() -> None:
    suspicions = Suspicions()
    suspicions.note(disputes(("a", "x"), ("b", "x"), ("c", None)), 10)
    assert suspicions.liars(10) == {"x"}
    assert suspicions.poor_reducers(10) == {"c"}


def test_a_reducer_cannot_frame_a_contributor_by_disputing_often() -> None:
    suspicions = Suspicions()
    for number in range(1, 100):
        suspicions.note(disputes(("a", "x")), number)
    assert suspicions.liars(100) == frozenset()


def test_memory_of_disputes_has_a_bound() -> None:
    suspicions = Suspicions()
    suspicions.note(disputes(*((f"r{number}", None) for number in range(5000))), 3)
    assert 0 < len(suspicions.poor_reducers(3)) <= 1024


def start_without(poor: frozenset[str]) -> tuple[dp.Start, dict[str, dp.Ready]]:
    ready = {peer: dp.Ready(round=NUMBER.to_proto(), tokens=100, samples=10) for peer in PEERS}
    start = build_start(
        POLICY,
        make_plan(PEERS),
        NUMBER,
        ready,
        codec=CODECS["int4"],
        unix_ms=0,
        exchange_seconds=5,
        poor_reducers=poor,
    )
    return start, ready


@given(st.sets(st.sampled_from(PEERS)))
def test_a_quarter_of_the_holders_is_kept_from_reducing_at_most_and_all_members_accept_that(poor: set[str]) -> None:
    start, ready = start_without(frozenset(poor))
    reducing = {piece.reducer for piece in start.partition}
    assert len(reducing) >= len(PEERS) - 1
    assert len(reducing & poor) == max(0, len(poor) - 1)
    assert start.partition[-1].end == start.elements
    for peer in PEERS:
        check_start(POLICY, make_plan(PEERS), NUMBER, ready[peer], peer, start)


@pytest.mark.parametrize("places", [[0, 1], [7], [1, 1]])
def test_a_start_that_keeps_too_many_from_reducing_is_refused(places: list[int]) -> None:
    start, ready = start_without(frozenset())
    del start.not_reducing[:]
    start.not_reducing.extend(places)
    with pytest.raises(PeerMisbehaved, match="from reducing"):
        check_start(POLICY, make_plan(PEERS), NUMBER, ready["p0"], "p0", start)
