"""Timeouts that are learned from earlier durations."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.learned_deadline import LearnedDeadline

FLOOR, CEILING = 1.0, 60.0
seconds = st.floats(0, 300)


def pace_that_saw(durations: list[float]) -> LearnedDeadline:
    pace = LearnedDeadline(FLOOR, CEILING)
    for duration in durations:
        pace.observe(duration)
    return pace


@given(st.lists(seconds, max_size=40), st.lists(st.booleans(), max_size=40))
def test_the_timeout_stays_between_floor_and_ceiling(durations, failures):
    pace = pace_that_saw(durations)
    for failed in failures:
        pace.observe_miss(CEILING, failed=failed)
        assert FLOOR <= pace.timeout_seconds <= CEILING


def test_the_timeout_is_the_ceiling_until_there_are_enough_observations():
    assert pace_that_saw([0.1, 0.1]).timeout_seconds == CEILING


@given(st.floats(0.01, 10), st.lists(st.floats(0.9, 1.1), min_size=11, max_size=31))
def test_the_timeout_allows_twice_the_usual_duration(usual, noise):
    assert pace_that_saw([usual * factor for factor in noise]).timeout_seconds > 2 * usual * 0.9


def test_one_slow_round_changes_little():
    calm = pace_that_saw([1.0] * 20)
    slow = pace_that_saw([*[1.0] * 20, 50.0])
    assert slow.timeout_seconds == calm.timeout_seconds


def test_failures_double_the_timeout_until_one_succeeds():
    pace = pace_that_saw([1.0] * 31)
    usual = pace.timeout_seconds
    for times in range(1, 4):
        pace.observe_miss(1.0, failed=True)
        assert pace.timeout_seconds >= usual * 2**times
    pace.observe(8.0)
    assert pace.timeout_seconds < 2 * usual


def test_rounds_that_went_on_without_a_peer_double_the_timeout_once():
    pace = pace_that_saw([1.0] * 31)
    usual = pace.timeout_seconds
    for _ in range(5):
        pace.observe_miss(usual, failed=False)
    assert 2 * usual <= pace.timeout_seconds <= 3 * usual
