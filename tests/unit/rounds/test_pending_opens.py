"""Opens that came too early."""

from __future__ import annotations

from atoll.core.round_id import RoundId
from atoll.node.rounds.pending_opens import PendingOpens
from atoll.node.rounds.types import Received
from atoll.v1 import dataplane_pb2 as dp


def open_of(peer: str, number: int, attempt: int = 0, plan_version: int = 1) -> Received:
    round_id = RoundId("r", plan_version, 0, number, attempt)
    return Received(peer, dp.RoundMessage(open=dp.Open(round=round_id.to_proto())))


def test_an_open_of_a_round_that_is_over_hides_none_of_the_next():
    early, late, due = PendingOpens(), open_of("p1", 5, attempt=1), open_of("p2", 6)
    early.keep(late, 0.0, 10.0)
    early.keep_ahead(due, 0.0, 10.0)
    assert early.take(1, 6, 1.0) == due


def test_of_a_plan_that_is_still_to_come_the_newest_round_s_is_kept():
    early = PendingOpens()
    early.keep(open_of("p1", 5, attempt=3, plan_version=2), 0.0, 10.0)
    early.keep(newer := open_of("p2", 6, plan_version=2), 0.0, 10.0)
    assert early.take(1, 6, 1.0) is None
    assert early.take(2, 6, 1.0) == newer


def test_nobody_takes_the_place_of_another_s_open_and_the_first_attempt_comes_first():
    early, honest = PendingOpens(), open_of("p1", 6)
    early.keep_ahead(honest, 0.0, 10.0)
    for number in (6, 7, 10**6):
        early.keep_ahead(open_of("liar", number, attempt=3), 0.0, 10.0)
    early.keep_ahead(second := open_of("p2", 6, attempt=1), 0.0, 10.0)
    assert early.take(1, 5, 1.0) is None
    assert [early.take(1, 6, 1.0) for _ in range(3)] == [honest, second, None]


def test_none_outlives_its_opener_s_patience():
    early = PendingOpens()
    early.keep_ahead(open_of("p1", 6), 0.0, 1.0)
    assert early.take(1, 6, 1.5) is None
