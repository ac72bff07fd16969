"""The downlink estimate is a lower bound of the link, from whatever peers send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.wire.traffic import DOWNLINK_MEMORY_SECONDS, DOWNLINK_WINDOW_SECONDS, DownlinkEstimate


@given(
    st.floats(1e4, 1e8),
    st.lists(st.tuples(st.integers(1, 128 * 1024), st.floats(0.0, 20.0)), min_size=1, max_size=80),
)
def test_the_estimate_never_exceeds_the_link(rate: float, pieces: list[tuple[int, float]]) -> None:
    """Pieces arrive one after another over a link of that rate, with pauses."""
    link, now = DownlinkEstimate(), 100.0
    for size, pause in pieces:
        now += pause + size / rate
        link.record(size, now)
        assert link.bytes_per_second(now) <= rate * 1.001
    assert link.bytes_per_second(now + DOWNLINK_WINDOW_SECONDS) <= rate * 1.001


def test_it_finds_most_of_a_busy_link_and_forgets_it_after_an_hour() -> None:
    link, now = DownlinkEstimate(), 0.0
    for _ in range(100):
        now += 0.1
        link.record(100_000, now)
    assert link.bytes_per_second(now) == pytest.approx(1e6, rel=0.06)
    link.record(64 * 1024, now)
    for piece in range(400):  # what waited while nobody read
        link.record(128 * 1024, now + 3 + piece / 1e5)
    now += 3
    for minute in range(50):
        link.record(1000, now + 60 * minute)
    assert link.bytes_per_second(now + 0.9 * DOWNLINK_MEMORY_SECONDS) == pytest.approx(1e6, rel=0.06)
    assert link.bytes_per_second(now + 1.1 * DOWNLINK_MEMORY_SECONDS) < 1000
