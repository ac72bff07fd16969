"""Exchange times of many layers at once are those of the rule that today's plans follow."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.planner.exchange_time import busy_seconds, levels, most, who_reduces
from atoll.coordinator.planner.reduce_shares import LEAST, Link, best_shares, vector_seconds

rates = st.sampled_from([LEAST, 1e6, 3e6, 1e7, 2.5e7, 1.25e8, 1e9]) | st.floats(1e5, 1e9)
holders = st.tuples(rates, st.booleans())
swarms = st.integers(2, 7).flatmap(
    lambda count: st.lists(st.lists(holders, min_size=count, max_size=count), min_size=1, max_size=3)
)


@given(swarms)
def test_links_are_busy_as_long_as_the_best_shares_keep_them(layers: list[list[tuple[float, bool]]]) -> None:
    table = np.array([[rate for rate, _ in members] for members in layers])
    reduces = who_reduces(np.array([[dialled for _, dialled in members] for members in layers]))
    busy = busy_seconds(levels(table, reduces)[:, None], table, reduces, most(reduces), table.shape[1])
    for members, row in zip(layers, busy, strict=True):
        links = {str(place): Link(rate, not dialled) for place, (rate, dialled) in enumerate(members)}
        shares = best_shares(links)
        assert np.allclose(row, [vector_seconds(links, shares, [peer]) for peer in links], rtol=1e-5)
