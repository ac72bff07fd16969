"""Exchange times of many layers at once are those of the rule that today's plans follow."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.planner.exchange_time import (
    finish_seconds_per_byte,
    largest_shares,
    link_seconds_per_byte,
    reducer_mask,
)
from atoll.coordinator.planner.reduce_shares import (
    MIN_LINK_BYTES_PER_SECOND,
    NodeLink,
    best_shares,
    exchange_seconds_per_byte,
)

rates = st.sampled_from([MIN_LINK_BYTES_PER_SECOND, 1e6, 3e6, 1e7, 2.5e7, 1.25e8, 1e9]) | st.floats(1e5, 1e9)
holders = st.tuples(rates, st.booleans())
swarms = st.integers(2, 7).flatmap(
    lambda count: st.lists(st.lists(holders, min_size=count, max_size=count), min_size=1, max_size=3)
)


@given(swarms)
def test_links_are_busy_as_long_as_the_best_shares_keep_them(layers: list[list[tuple[float, bool]]]) -> None:
    table = np.array([[rate for rate, _ in members] for members in layers])
    reduces = reducer_mask(np.array([[dialable for _, dialable in members] for members in layers]))
    busy = link_seconds_per_byte(
        finish_seconds_per_byte(table, reduces)[:, None], table, reduces, largest_shares(reduces), table.shape[1]
    )
    for members, row in zip(layers, busy, strict=True):
        links = {str(place): NodeLink(rate, not dialable) for place, (rate, dialable) in enumerate(members)}
        shares = best_shares(links)
        assert np.allclose(row, [exchange_seconds_per_byte(links, shares, [peer]) for peer in links], rtol=1e-5)
