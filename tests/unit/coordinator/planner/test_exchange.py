"""Exchange times of many layers at once are those of the rule that today's plans follow."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.planner.exchange import seconds_per_byte
from atoll.coordinator.planner.shares import Link, best_shares, vector_seconds

members = st.lists(st.tuples(st.floats(1e4, 1e10), st.booleans()), min_size=2, max_size=9)


@given(members)
def test_seconds_are_those_of_the_best_shares(holders: list[tuple[float, bool]]) -> None:
    links = {str(place): Link(rate, not dialled) for place, (rate, dialled) in enumerate(holders)}
    expected = vector_seconds(links, best_shares(links))
    rates, dialled = (np.array([column]) for column in zip(*holders, strict=True))
    assert np.isclose(seconds_per_byte(rates, dialled)[0], expected, rtol=1e-6)


def test_who_holds_a_layer_alone_exchanges_nothing() -> None:
    assert seconds_per_byte(np.array([[1e6]]), np.array([[True]])).tolist() == [0.0]
