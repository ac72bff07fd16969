"""Training policy: hours, monthly traffic, battery, use by others."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, time, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.node.system.training_policy import (
    MAINS_POWER_SETTLE_TIME,
    Hours,
    MachineObservation,
    PauseCause,
    TrainingDecision,
    TrainingPolicy,
    decide,
    next_month,
    parse_hours,
)

NOON = datetime(2026, 11, 21, 12, 0)
times = st.times().map(lambda at: at.replace(second=0, microsecond=0))
moments = st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1))
windows = st.lists(st.builds(Hours, times, times), max_size=3).map(tuple)
policies = st.builds(
    TrainingPolicy,
    hours=windows,
    monthly_bytes=st.sampled_from([0.0, 1e9]),
    pause_on_battery=st.booleans(),
    idle_seconds=st.sampled_from([0.0, 60.0, 600.0]),
)


@st.composite
def days(draw):
    """Observations five seconds apart: the plug is pulled, people use the machine, traffic adds up."""
    seen, at = [], draw(moments)
    unused, month = 0.0, 0
    for second in range(0, 5 * draw(st.integers(1, 120)), 5):
        unused = 0.0 if draw(st.integers(0, 9)) == 0 else unused + 5
        month += draw(st.integers(0, 10**8))
        battery = draw(st.integers(0, 9)) == 0
        seen.append(MachineObservation(at + timedelta(seconds=second), float(second), month, battery, unused))
    return seen


def judge(policy, day):
    decision, decisions = TrainingDecision(), []
    for seen in day:
        decision = decide(policy, seen, decision)
        decisions.append(decision)
    return decisions


@given(policies, days())
def test_it_trains_only_while_every_limit_allows_it(policy, day):
    for seen, decision in zip(day, judge(policy, day), strict=True):
        assert decision.train == (decision.cause is None) == (not decision.reason)
        if decision.train:
            assert not policy.hours or any(window.contains(seen.local.time()) for window in policy.hours)
            assert not policy.monthly_bytes or seen.month_bytes < policy.monthly_bytes
            assert not (policy.pause_on_battery and seen.on_battery)
            assert seen.seconds_since_use >= policy.idle_seconds
        if decision.until is not None:
            assert decision.until > seen.local


@given(policies.map(lambda policy: replace(policy, hours=())), days())
def test_training_starts_are_at_least_the_settle_time_apart(policy, day):
    """At least the settle time passes between two starts of training."""
    decisions = judge(policy, day)
    starts = [now.monotonic for now, a, b in zip(day[1:], decisions, decisions[1:], strict=False) if b.train > a.train]
    assert all(later - earlier >= MAINS_POWER_SETTLE_TIME.total_seconds() for earlier, later in pairwise(starts))


@given(policies, moments)
def test_training_resumes_at_the_announced_time(policy, at):
    """At the time that a decision names, the node trains unless another limit pauses it."""
    quiet = replace(policy, pause_on_battery=False, idle_seconds=0.0)
    decision = decide(quiet, MachineObservation(at, 0.0, month_bytes=2 * 10**9), TrainingDecision())
    for _ in range(3):  # the month may turn outside the hours
        if decision.until is None:
            break
        then = MachineObservation(decision.until, 10.0, month_bytes=0)
        decision = decide(quiet, then, decision)
    assert decision.train


def test_battery_pauses_at_once_and_mains_power_must_settle():
    unplugged = decide(TrainingPolicy(), MachineObservation(NOON, 100.0, on_battery=True), TrainingDecision())
    assert (unplugged.train, unplugged.cause) == (False, PauseCause.BATTERY)
    back = decide(TrainingPolicy(), MachineObservation(NOON, 105.0), unplugged)
    assert (back.train, back.cause) == (False, PauseCause.BATTERY)
    assert decide(
        TrainingPolicy(), MachineObservation(NOON, 100.0 + MAINS_POWER_SETTLE_TIME.total_seconds()), back
    ).train
    assert decide(
        TrainingPolicy(pause_on_battery=False), MachineObservation(NOON, 100.0, on_battery=True), TrainingDecision()
    ).train


def test_a_window_may_cross_midnight():
    night = parse_hours("22:00-07:00")
    allowed = [hour for hour in range(24) if night[0].contains(time(hour, 30))]
    assert allowed == [0, 1, 2, 3, 4, 5, 6, 22, 23]
    decision = decide(TrainingPolicy(hours=night), MachineObservation(NOON, 0.0), TrainingDecision())
    assert (decision.cause, decision.until) == (PauseCause.HOURS, NOON.replace(hour=22))
    assert "22:00" in decision.reason


def test_hours_are_parsed_with_spaces_and_short_forms():
    assert parse_hours(" ") == ()
    assert parse_hours("9:00 - 24:00, 1:30-2:00") == (Hours(time(9), time(0)), Hours(time(1, 30), time(2)))
    assert parse_hours("00:00-24:00")[0].contains(time(3))
    for wrong in ("22-7", "25:00-07:00", "22:00", "22:00-07:00;", "22:00-24:01", ","):
        with pytest.raises(ConfigError, match="window"):
            parse_hours(wrong)


@given(moments)
def test_the_month_turns_on_its_first_day(at):
    turn = next_month(at)
    assert (turn.day, turn.time()) == (1, time(0))
    assert (turn - timedelta(microseconds=1)).month == at.month
