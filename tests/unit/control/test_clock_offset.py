"""Clock offset of a node, estimated from the times of its heartbeats."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.control.clock_offset import ClockOffset

WAY = st.floats(0.0, 2.0)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(WAY, WAY, WAY), min_size=1, max_size=20))
def test_the_error_is_at_most_half_the_shortest_round_trip(
    ahead: float, ways: list[tuple[float, float, float]]
) -> None:
    offset, now = ClockOffset(), 1.7e9
    for sequence, (there, thinks, back) in enumerate(ways, 1):
        offset.heartbeat_sent(sequence, now + ahead)
        now += there + thinks
        told = now
        now += back
        offset.heartbeat_answered(sequence, told, now + ahead)
    shortest = min(sum(way) for way in ways[-8:])
    assert abs(offset.ahead_seconds - ahead) <= shortest / 2 + 1e-5


def test_answers_without_a_time_or_a_heartbeat_are_ignored() -> None:
    offset = ClockOffset()
    offset.heartbeat_answered(1, 50.0, 60.0)  # to no heartbeat
    offset.heartbeat_sent(2, 100.0)
    offset.heartbeat_answered(2, 0.0, 100.2)  # of an older coordinator
    offset.heartbeat_sent(3, 100.0)
    offset.heartbeat_answered(3, 90.0, 99.0)  # the clock was set back meanwhile
    assert offset.ahead_seconds is None
    offset.heartbeat_sent(4, 100.0)
    offset.heartbeat_sent(5, 101.0)
    offset.heartbeat_answered(5, 91.1, 101.2)  # both heartbeats at once
    offset.heartbeat_answered(4, 50.0, 101.3)
    assert abs(offset.ahead_seconds - 10.0) < 1e-9
    for sequence in range(6, 200):
        offset.heartbeat_sent(sequence, 200.0)
    offset.heartbeat_answered(6, 1.0, 200.1)  # forgotten: too many were never answered
    assert abs(offset.ahead_seconds - 10.0) < 1e-9
