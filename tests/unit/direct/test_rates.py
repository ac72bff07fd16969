"""The uplink estimate and its shares on simulated links."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.direct.rates import (
    MANY,
    MEMORY_WINDOWS,
    MIN_BYTES_PER_SECOND,
    PROBE_FACTORS,
    START_BYTES_PER_SECOND,
    START_STEP,
    PathEstimate,
    UplinkEstimate,
    WindowSample,
    fair_shares,
)

SECONDS = 0.32
rates = st.floats(1e6, 1e9)


@dataclass
class Link:
    """Senders behind one uplink; some have a narrower path."""

    uplink: float
    paths: list[float]
    noise: Callable[[], float] = lambda: 1.0

    def window(
        self, state: UplinkEstimate, known: list[PathEstimate]
    ) -> tuple[UplinkEstimate, list[PathEstimate], float]:
        """Pass one window in which every sender has a backlog."""
        given = fair_shares(
            state.budget_bytes_per_second, {i: path.limit_bytes_per_second for i, path in enumerate(known)}
        )
        wanted = [min(given[i], path) for i, path in enumerate(self.paths)]
        passes = self._split(wanted)
        sent = [WindowSample(int(rate * SECONDS * self.noise()), backlogged=True) for rate in passes]
        if state.started:
            known = [
                path.observe(SECONDS, one, given[i]) for i, (path, one) in enumerate(zip(known, sent, strict=True))
            ]
        return state.observe(SECONDS, sent), known, sum(passes)

    def _split(self, wanted: list[float]) -> list[float]:
        """A full link serves all senders equally, up to their rates."""
        fair = fair_shares(self.uplink, dict(enumerate(wanted)))
        return [min(fair[i], rate) for i, rate in enumerate(wanted)]

    def run(self, windows: int, state: UplinkEstimate | None = None) -> tuple[UplinkEstimate, list[float]]:
        state, known, totals = state or UplinkEstimate(), [PathEstimate() for _ in self.paths], list[float]()
        for _ in range(windows):
            state, known, total = self.window(state, known)
            totals.append(total)
        return state, totals


@given(rates, st.integers(1, 12))
def test_a_steady_link_is_known_soon_and_kept_nearly_full(uplink: float, senders: int) -> None:
    state, totals = Link(uplink, [math.inf] * senders).run(40)
    assert state.bytes_per_second == pytest.approx(uplink, rel=0.03)
    assert sum(totals[8:]) / len(totals[8:]) >= 0.94 * uplink
    assert (
        state.budget_bytes_per_second <= uplink * PROBE_FACTORS[0] * 1.001
    )  # growing steps only while there is growth


@pytest.mark.parametrize("late", [0.0, 0.25, 0.4])
def test_an_estimate_from_bursts_finds_a_link_that_carries_more_though_acknowledgements_are_late(late: float) -> None:
    """A fraction `late` of each window still shows the previous rate; streams of a route start with such bursts."""
    state, before = UplinkEstimate((4e6,) * MEMORY_WINDOWS, started=True), 4e6
    for _ in range(60):
        given = state.budget_bytes_per_second
        passes = min(0.97 * ((1 - late) * given + late * before), 12e6)
        state, before = state.observe(SECONDS, [WindowSample(int(passes * SECONDS), backlogged=True)]), given
    assert state.bytes_per_second == pytest.approx(12e6, rel=0.1)


@given(rates, st.floats(0.05, 20), st.integers(1, 6))
def test_it_follows_the_link_both_ways(uplink: float, change: float, senders: int) -> None:
    state, _ = Link(uplink, [math.inf] * senders).run(30)
    after = max(uplink * change, 1e6)
    state, _ = Link(after, [math.inf] * senders).run(MEMORY_WINDOWS + 40, state)
    assert state.bytes_per_second == pytest.approx(after, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_run_away_with_it(seed: int) -> None:
    """The largest of several noisy values is too large, but not by more than the noise."""
    rng = random.Random(seed)
    link = Link(12.5e6, [math.inf] * 3, noise=lambda: rng.uniform(0.95, 1.05))
    state, _ = link.run(400)
    assert 12.5e6 * 0.95 <= state.bytes_per_second <= 12.5e6 * 1.06


def test_a_slow_receiver_leaves_its_share_to_the_others() -> None:
    state, totals = Link(12.5e6, [0.6e6, math.inf, math.inf]).run(60)
    assert state.bytes_per_second == pytest.approx(12.5e6, rel=0.03)
    assert sum(totals[20:]) / len(totals[20:]) >= 0.9 * 12.5e6


def test_a_receiver_that_was_slow_gets_its_share_again() -> None:
    link = Link(12.5e6, [0.6e6, math.inf])
    state, known = UplinkEstimate(), [PathEstimate(), PathEstimate()]
    for _ in range(30):
        state, known, _ = link.window(state, known)
    assert known[0].limit_bytes_per_second < 1e6
    link.paths[0] = math.inf
    for _ in range(30):
        state, known, _ = link.window(state, known)
    given = fair_shares(state.budget_bytes_per_second, {i: path.limit_bytes_per_second for i, path in enumerate(known)})
    assert given[0] == pytest.approx(given[1], rel=0.01)


def test_a_connection_in_slow_start_is_not_held_back() -> None:
    path, rate = PathEstimate(), 0.1e6
    for _ in range(6):
        path = path.observe(SECONDS, WindowSample(int(rate * SECONDS), backlogged=True), 10e6)
        rate *= 2
    assert path.limit_bytes_per_second == math.inf


@given(st.lists(st.tuples(st.integers(0, 10**7), st.booleans()), max_size=60))
def test_what_applications_ask_for_never_lowers_it(sent: list[tuple[int, bool]]) -> None:
    state, _ = Link(12.5e6, [math.inf]).run(30)
    known = state.bytes_per_second
    for delivered, _ in sent:
        state = state.observe(SECONDS, [WindowSample(delivered, backlogged=False)])
        assert state.bytes_per_second >= known
        known = state.bytes_per_second


def test_a_start_asks_for_more_only_after_it_got_through() -> None:
    state = UplinkEstimate()
    assert (state.budget_bytes_per_second, state.bytes_per_second) == (START_BYTES_PER_SECOND, math.inf)
    state = state.observe(SECONDS, [WindowSample(0, backlogged=False)])
    assert state.budget_bytes_per_second == START_BYTES_PER_SECOND
    state = state.observe(SECONDS, [WindowSample(int(START_BYTES_PER_SECOND * SECONDS), backlogged=True)])
    assert state.budget_bytes_per_second == START_STEP * START_BYTES_PER_SECOND
    assert (
        state.observe(SECONDS, [WindowSample(1000, backlogged=True)]).budget_bytes_per_second
        == START_STEP * START_BYTES_PER_SECOND
    )


@pytest.mark.parametrize(("is_link_bound", "busy"), [(False, 1.0), (True, 0.25), (False, 0.25)])
def test_a_start_grows_for_one_peer_of_several_and_for_bursts_too(is_link_bound: bool, busy: float) -> None:
    """Neither window measures the link, but both got through."""
    state = UplinkEstimate()
    for _ in range(4):
        delivered = int(busy * state.budget_bytes_per_second * SECONDS)
        state = state.observe(
            SECONDS, [WindowSample(delivered, backlogged=busy == 1.0, busy=busy)], is_link_bound=is_link_bound
        )
    assert state.budget_bytes_per_second == START_STEP**4 * START_BYTES_PER_SECOND
    assert (
        state.observe(
            SECONDS, [WindowSample(1000, backlogged=False, busy=0.0)], is_link_bound=is_link_bound
        ).budget_bytes_per_second
        == state.budget_bytes_per_second
    )


def test_connections_that_only_begin_to_grow_are_not_taken_for_the_link() -> None:
    """TCP doubles its rate every round trip; a slow start is not the link's rate."""
    state = UplinkEstimate()
    for share in (0.05, 0.1, 0.2, 0.4):
        state = state.observe(SECONDS, [WindowSample(int(share * START_BYTES_PER_SECOND * SECONDS), backlogged=True)])
    assert not state.started


@given(st.floats(2e6, 1e9))
def test_a_start_asks_for_more_than_the_link_carries_for_two_windows_at_most(uplink: float) -> None:
    state, over = UplinkEstimate(), 0
    while not state.started:
        over += state.budget_bytes_per_second > 1.3 * uplink
        state = state.observe(
            SECONDS, [WindowSample(int(min(uplink, state.budget_bytes_per_second) * SECONDS), backlogged=True)]
        )
    assert over <= 2
    assert state.bytes_per_second == pytest.approx(uplink, rel=0.01)


@given(rates, st.lists(st.one_of(rates, st.just(math.inf)), min_size=1, max_size=12))
def test_shares_fill_the_budget_and_are_equal_where_nothing_forbids(budget: float, limits: list[float]) -> None:
    given_ = fair_shares(budget, dict(enumerate(limits)))
    assert all(given_[i] <= limit * 1.0001 for i, limit in enumerate(limits))
    least = min(MIN_BYTES_PER_SECOND, max(budget, MANY * MIN_BYTES_PER_SECOND) / len(limits))
    assert all(rate >= least for rate in given_.values())
    if budget >= MIN_BYTES_PER_SECOND * len(limits):
        assert sum(given_.values()) == pytest.approx(min(budget, sum(limits)))
        free = [given_[i] for i, limit in enumerate(limits) if given_[i] < limit * 0.999]
        assert not free or max(free) == pytest.approx(min(free))


@pytest.mark.parametrize(("members", "uplink"), [(64, 1.25e6), (256, 12.5e6), (1000, 12.5e6)])
def test_the_shares_of_a_large_swarm_do_not_exceed_the_uplink(members: int, uplink: float) -> None:
    """10 Mbit/s among 64 members, 100 Mbit/s among 256 and 1,000."""
    assert sum(fair_shares(uplink, dict.fromkeys(range(members), math.inf)).values()) == pytest.approx(uplink)
