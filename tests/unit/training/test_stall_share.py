"""The share of training time that waits for text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.training.stall_share import MEMORY_SECONDS, StallShare

LOOKS = st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4), st.booleans()), min_size=1, max_size=50)


@given(LOOKS)
def test_a_share_is_between_none_and_all(looks: list[tuple[float, float, bool]]) -> None:
    share, now, stalled = StallShare(), 0.0, 0.0
    for passed, stall, training in looks:
        now, stalled = now + passed, stalled + stall
        share.look(now, stalled, training)
        assert 0 <= share.value <= 1


@given(st.floats(0, 1), st.floats(0.01, 100), st.integers(2, 100))
def test_a_steady_wait_is_its_share(wanted: float, step: float, looks: int) -> None:
    share = StallShare()
    for number in range(looks):
        share.look(number * step, number * step * wanted, training=True)
    assert share.value == pytest.approx(wanted, abs=1e-6)


def test_time_without_training_does_not_count() -> None:
    share = StallShare()
    share.look(0, 0, training=True)
    share.look(10, 5, training=True)
    share.look(1000, 900, training=False)
    share.look(2000, 900, training=True)
    assert share.value == 0.5
    share.look(2010, 900, training=True)
    assert 0.2 < share.value < 0.3


def test_old_stalls_are_forgotten() -> None:
    share = StallShare()
    share.look(0, 0, training=True)
    share.look(60, 60, training=True)
    for minute in range(1, 60):
        share.look(60 + 60 * minute, 60, training=True)
    assert share.value < 60 / MEMORY_SECONDS / 100
