"""The bound that the benchmark of pipelines compares with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.pipeline_bound import Flush
from hypothesis import given
from hypothesis import strategies as st

COMPUTE = Flush(4, 8, 1.0, 2.0, 0.0, 0.0, 1.0, 0.0)


def test_without_transfers_it_is_what_every_1f1b_takes() -> None:
    assert COMPUTE.seconds == pytest.approx((8 + 4 - 1) * 3.0)
    assert COMPUTE.steady_seconds == pytest.approx(8 * 3.0)
    assert not COMPUTE.limited_by_link


def test_distance_counts_once_there_and_once_back() -> None:
    assert replace(COMPUTE, one_way_seconds=5.0).seconds == pytest.approx(COMPUTE.seconds + 2 * 3 * 5.0)


def test_a_stage_between_two_sends_activations_and_gradients_over_one_uplink() -> None:
    thin = replace(COMPUTE, activation_bytes=10.0, gradient_bytes=10.0)
    assert thin.limited_by_link
    assert thin.steady_seconds == pytest.approx(8 * 20.0)
    assert replace(thin, stages=2).steady_seconds == pytest.approx(8 * 10.0)


def test_two_stages_on_a_thin_link() -> None:
    """The first activation is computed, all pass one after another, the last turns round and comes back."""
    thin = Flush(2, 5, 1.0, 2.0, 10.0, 4.0, 1.0, 7.0)
    assert thin.seconds == pytest.approx(1.0 + 5 * 10.0 + 7.0 + (1.0 + 2.0) + 4.0 + 7.0 + 2.0)


@given(
    st.integers(2, 9), st.integers(1, 64), st.floats(0, 1), st.floats(0, 1), st.floats(0, 9), st.floats(0, 9),
    st.floats(0, 3),
)  # fmt: skip
def test_it_is_never_below_one_micro_batch_there_and_back_nor_below_the_slowest_part(
    stages: int, count: int, forward: float, backward: float, activation: float, gradient: float, distance: float
) -> None:
    flush = Flush(stages, count, forward, backward, activation, gradient, 1.0, distance)
    hops = (stages - 1) * (activation + gradient + 2 * distance)
    assert flush.seconds >= 0.999999 * (stages * (forward + backward) + hops)
    assert flush.seconds >= 0.999999 * flush.steady_seconds
