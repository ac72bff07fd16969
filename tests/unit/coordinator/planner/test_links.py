"""Links: what was not measured is estimated, and who cannot pass is not asked to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.coordinator.planner.worlds import MBIT, machine, swarm

from atoll.coordinator.planner.links import (
    RELAY_BYTES_PER_SECOND,
    MeasuredPath,
    fill_missing_links,
    islands,
    transfer_rates,
)
from atoll.coordinator.planner.problem import Reach
from atoll.coordinator.planner.regions import regions


def test_a_pair_that_was_not_measured_is_as_far_as_the_shortest_way() -> None:
    rtt = np.array([[0, 0.01, np.nan], [0.01, 0, 0.03], [np.nan, 0.02, 0]])
    links = fill_missing_links(rtt, np.full((3, 3), np.inf))
    assert links.rtt_seconds[0, 2] == pytest.approx(0.04)
    assert links.rtt_seconds[1, 2] == 0.03, "of two that differ the longer holds"


def test_machines_without_any_path_are_islands() -> None:
    rtt = np.full((3, 3), np.inf)
    rtt[0, 1] = rtt[1, 0] = 0.01
    links = fill_missing_links(rtt, np.full((3, 3), np.inf))
    assert islands(np.isfinite(links.rtt_seconds)) == [[0, 1], [2]]


def test_a_path_of_machines_goes_before_that_of_regions() -> None:
    machines = [machine("ann"), machine("ben"), machine("cleo", region="asia")]
    problem = swarm(machines, [MeasuredPath("ann", "ben", 0.5), MeasuredPath("europe", "asia", 0.2)])
    assert problem.links.rtt_seconds[0].tolist() == [0.0, 0.5, 0.2]


def test_rates_are_the_narrowest_of_three_and_directional() -> None:
    machines = [machine("ann", uplink_bytes_per_second=10 * MBIT), machine("ben", downlink_bytes_per_second=100 * MBIT)]
    rates = transfer_rates(swarm(machines, [MeasuredPath("ann", "ben", 0.02, np.inf, 50 * MBIT)])) / 0.9
    assert rates[0, 1] == pytest.approx(10 * MBIT)
    assert rates[1, 0] == pytest.approx(50 * MBIT)


@pytest.mark.parametrize(
    ("one", "other", "most"),
    [
        (Reach.PUBLIC, Reach.OUTBOUND, np.inf),
        (Reach.RELAYED, Reach.RELAYED, RELAY_BYTES_PER_SECOND),
        (Reach.RELAYED, Reach.OUTBOUND, 0.0),
    ],
)
def test_reach_decides_the_rate_between_two_machines(one: Reach, other: Reach, most: float) -> None:
    rates = transfer_rates(swarm([machine("ann", reach=one), machine("ben", reach=other)]))
    assert rates[0, 1] == pytest.approx(0.9 * min(most, 1000 * MBIT))


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-0.001, 0.001)), min_size=1, max_size=12))
def test_regions_do_not_move_with_noise(places: list[tuple[int, float]]) -> None:
    """Three places 100 ms apart, a few milliseconds of noise: machines are in one region just when in one place."""
    machines = [machine(f"m{number}") for number in range(len(places))]
    problem = swarm(machines)
    for one, (place, noise) in enumerate(places):
        for other, (there, noise_there) in enumerate(places):
            problem.links.rtt_seconds[one, other] = abs(place - there) * 0.1 + 0.005 + abs(noise + noise_there)
    found = regions(problem)
    assert all(
        (found[one] == found[other]) == (places[one][0] == places[other][0])
        for one in range(len(places))
        for other in range(len(places))
    )
