"""A round is opened when its tokens will be there by the time that members are asked, not when all were reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine_plans import GENESIS, POLICY, make_plan

from atoll.core.round_id import RoundId
from atoll.node.averaging.turns import Turns
from atoll.v1 import dataplane_pb2 as dp

PEERS = [f"p{i}" for i in range(4)]
DUE, RATE = 4000, 100  # tokens of a round; what each trains in a second, so that a round takes ten
STEP = 0.01


class Watch:
    """The next opener of four members that train alike and report every `interval` seconds."""

    def __init__(self, interval: float = 1.0, lead: float = 0.0, stop_tokens: int = 10**9) -> None:
        policy = replace(POLICY, due_tokens=lambda committed, members: DUE, stop_tokens=stop_tokens)
        plan = make_plan(PEERS)
        self.turns = Turns("p0", policy, GENESIS, plan, 0.0)
        opener = RoundId("r", plan.version, 0, 1, 0).order(plan.members).index("p0")
        self.attempt = RoundId("r", plan.version, 0, 1, opener)
        self.interval, self.lead = interval, lead
        self.stops: dict[str, float] = {}  # who trains no more from then on, and says so
        self.silent: dict[str, float] = {}  # who says nothing from then on

    def opens(self, until: float) -> float | None:
        """When, if it does."""
        steps = round(until / STEP)
        for step in range(1, steps + 1):
            now = step * STEP
            if step % round(self.interval / STEP) == 0:
                for peer in PEERS[1:]:
                    if now < self.silent.get(peer, until):
                        self.turns.hear(peer, dp.TokenReport(tokens=self._trained(peer, now)), now)
            self.turns.hear_self(self._trained("p0", now), leaving=False, step_seconds=0.1, now=now)
            if self.turns.attempt_to_open(self.attempt, now, self.lead) is not None:
                return now
        return None

    def _trained(self, peer: str, now: float) -> int:
        return int(RATE * min(now, self.stops.get(peer, now)))


@given(interval=st.sampled_from([0.1, 0.25, 0.7, 1.0]), lead=st.floats(0.0, 1.0))
def test_it_opens_so_that_the_tokens_are_there_when_members_are_asked(interval: float, lead: float) -> None:
    opened = Watch(interval, lead).opens(12.0)
    assert opened is not None
    assert abs(opened + lead * 3 / 4 - 10.0) <= 0.1  # our own do not travel


@pytest.mark.parametrize("lead", [5.0, 100.0])
def test_four_fifths_were_reported_whatever_seems_to_be_under_way(lead: float) -> None:
    opened = Watch(1.0, lead).opens(12.0)
    assert opened is not None
    assert 8.0 <= opened <= 9.0


def test_who_trains_no_more_is_expected_to_bring_nothing_more() -> None:
    watch = Watch()
    watch.stops = dict.fromkeys(PEERS, 8.5)  # 3400 tokens: not a round, and never one
    assert watch.opens(40.0) is None


def test_of_who_is_silent_no_more_is_expected_than_until_its_next_report() -> None:
    watch = Watch()
    watch.silent = {"p1": 9.05}  # 900 tokens; what comes of it later is nobody's guess
    opened = watch.opens(12.0)
    assert opened is not None
    assert opened == pytest.approx(10.0, abs=0.1)
    watch = Watch()
    watch.silent = dict.fromkeys(PEERS[1:], 7.05)  # 2100 and at most 300 more, and ours
    opened = watch.opens(11.0)
    assert opened is None


def test_the_runs_last_round_waits_until_all_of_it_was_reported() -> None:
    assert Watch(lead=0.5).opens(12.0) < Watch(lead=0.5, stop_tokens=DUE).opens(12.0) == 10.0


def test_who_began_anew_is_not_expected_to_go_on_as_before() -> None:
    watch = Watch()
    for number in range(1, 6):
        watch.turns.hear("p1", dp.TokenReport(tokens=1000 * number), number / 10)
    watch.turns.hear("p1", dp.TokenReport(tokens=0), 0.6)
    for peer in PEERS[2:]:
        watch.turns.hear(peer, dp.TokenReport(tokens=1500), 0.6)
    watch.turns.hear_self(500, leaving=False, step_seconds=0.1, now=0.6)
    assert watch.turns.attempt_to_open(watch.attempt, 0.65, lead=1.0) is None
