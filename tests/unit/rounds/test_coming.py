"""A round is opened when its tokens will be there by the time that members are asked, not when all were reported."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import machine_world
from support.machine_plans import GENESIS, POLICY, Routes, make_plan
from support.machine_world import World

from atoll.core.round_id import RoundId
from atoll.node.rounds.round_trigger import RoundTrigger
from atoll.v1 import dataplane_pb2 as dp

PEERS = [f"p{i}" for i in range(4)]
DUE, RATE = 4000, 100  # tokens of a round; what each trains in a second, so that a round takes ten
STEP = 0.01


class Watch:
    """The next opener of four members that train alike and report every `interval` seconds."""

    def __init__(self, interval: float = 1.0, lead: float = 0.0, *, routes: Routes | None = None, **changes) -> None:
        policy = replace(POLICY, due_tokens=lambda committed, members: DUE, **changes)
        plan = make_plan(PEERS, routes=routes)
        self.turns = RoundTrigger("p0", policy, GENESIS, plan, 0.0)
        self.attempt = RoundId("r", plan.version, 0, 1, plan.openers(GENESIS).index("p0"))
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
            if self.asked(now):
                return now
        return None

    def asked(self, now: float) -> bool:
        return self.turns.attempt_to_open(self.attempt, now, lambda peer: self.lead) is not None

    def _trained(self, peer: str, now: float) -> int:
        return int(RATE * min(now, self.stops.get(peer, now)))


@given(interval=st.sampled_from([0.1, 0.25, 0.7, 1.0]), lead=st.floats(0.0, 1.0))
def test_it_opens_so_that_the_tokens_are_there_when_members_are_asked(interval: float, lead: float) -> None:
    opened = Watch(interval, lead).opens(12.0)
    assert opened is not None
    assert abs(opened + lead * 3 / 4 - 10.0) <= 0.1  # our own do not travel


@pytest.mark.parametrize("lead", [5.0, 100.0])
def test_four_fifths_were_reported_whatever_seems_to_be_under_way(lead: float) -> None:
    opened = Watch(1.0, lead, open_timeout=timedelta(seconds=200)).opens(12.0)
    assert opened is not None
    assert 8.0 <= opened <= 9.0


def test_whoever_takes_long_to_answer_nobody_opens_so_early_that_another_ones_turn_is_passed_over() -> None:
    opened = Watch(1.0, 100.0, open_timeout=timedelta(seconds=2)).opens(12.0)
    assert opened is not None
    assert opened >= 9.0


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
    watch = Watch(lead=1.0)
    for number in range(1, 6):
        watch.turns.hear("p1", dp.TokenReport(tokens=1000 * number), number / 10)
    for peer in PEERS[2:]:
        watch.turns.hear(peer, dp.TokenReport(tokens=1700), 1.0)
    watch.turns.hear_self(0, leaving=False, step_seconds=0.1, now=1.0)
    watch.turns.hear("p1", dp.TokenReport(tokens=0), 0.6)
    assert not watch.asked(1.0)
    watch.turns.hear("p1", dp.TokenReport(tokens=200), 1.0)
    assert watch.asked(1.0)  # 500 a second now: 4100 in all


def test_reports_that_come_at_once_are_no_pace() -> None:
    watch = Watch(lead=1.0)
    for peer in PEERS[2:]:
        watch.turns.hear(peer, dp.TokenReport(tokens=1700), 1.0)
    watch.turns.hear_self(100, leaving=False, step_seconds=0.1, now=1.0)
    for tokens, now in ((0, 0.999), (100, 1.0)):
        watch.turns.hear("p1", dp.TokenReport(tokens=tokens), now)
    assert not watch.asked(1.0)


def test_nobody_is_expected_to_bring_more_than_a_round_counts_of_it() -> None:
    watch = Watch(lead=1.0)
    for peer in PEERS[2:]:
        watch.turns.hear(peer, dp.TokenReport(tokens=0), 0.5)
    watch.turns.hear_self(0, leaving=False, step_seconds=0.1, now=0.5)
    cap = watch.turns._cap("p1")
    watch.turns._policy = replace(watch.turns._policy, due_tokens=lambda committed, members: cap + 1)
    for tokens, now in ((0, 0.1), (cap - 1, 0.3)):
        watch.turns.hear("p1", dp.TokenReport(tokens=tokens), now)
    assert not watch.asked(0.5)


def test_of_those_who_hold_other_layers_nothing_is_expected() -> None:
    last = POLICY.layers - 1
    watch = Watch(lead=1.0, routes=[[("p0", 0, last)], [("p1", 0, last)], [("p2", 0, 0), ("p3", 1, last)]])
    watch.turns.hear("p1", dp.TokenReport(tokens=DUE // 2), 1.0)
    watch.turns.hear_self(DUE // 2 - 1, leaving=False, step_seconds=0.1, now=1.0)
    for peer in PEERS[2:]:
        for tokens, now in ((0, 0.5), (1000, 1.0)):
            watch.turns.hear(peer, dp.TokenReport(tokens=tokens), now)
    assert not watch.asked(1.0)


@pytest.mark.parametrize("slow_step", [0.05, 1.0, 3.0])
def test_rounds_of_whole_machines_have_the_tokens_that_they_are_due_after(slow_step: float, monkeypatch) -> None:
    monkeypatch.setattr(machine_world, "TICK", 0.05)
    monkeypatch.setattr(machine_world, "TOKENS_PER_TICK", 5)  # a round in ten seconds
    slow = timedelta(seconds=60)
    timeouts = {"round_max": timedelta(seconds=600), "exchange_timeout": slow, "decision_timeout": slow}
    world = World(4, 1, policy=replace(POLICY, due_tokens=lambda committed, members: DUE, **timeouts))
    world.network.delay = (0.25, 0.3)
    world.step_seconds = {**dict.fromkeys(world.peers, 0.05), "p3": slow_step}
    world.exchange_seconds = lambda start: 0.5
    world.run(400)
    tokens = [head.committed_tokens for _, head in sorted(world.committed.items())]
    rounds = [after - before for before, after in pairwise(tokens)][8:]
    assert len(rounds) > 20
    assert 0.97 * DUE <= median(rounds) <= 1.03 * DUE
