"""Builds a problem's N × N link tables from measured paths. Pure.

A path is between two machines or, for all pairs at once, between two regions (or within one region). A path between
machines has precedence. Large swarms measure few pairs: a missing round trip is estimated by the shortest way over
measured pairs, which real packet routes seldom exceed by much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path

from atoll.coordinator.planner.problem import BoolArray, FloatArray, Links, Machine, Problem, Reach
from atoll.core.errors import PlanInputInvalid

RELAY_BYTES_PER_SECOND = 1_250_000.0  # through a seed: 10 Mbit/s
_LEAST_RTT = 1e-5  # seconds: SciPy treats 0 as "no edge"


@dataclass(frozen=True)
class MeasuredPath:
    """The path from `source` to `target` (machines or regions), without their access links."""

    source: str
    target: str
    rtt_seconds: float
    bytes_per_second: float = np.inf  # from source to target
    back_bytes_per_second: float | None = None  # from target to source; None: the same


def links_from_paths(machines: Sequence[Machine], paths: Iterable[MeasuredPath]) -> Links:
    """Build the tables of all pairs. Raises `PlanInputInvalid` for an unknown name and for an invalid number."""
    count = len(machines)
    rtt = np.full((count, count), np.inf)
    rate = np.full((count, count), np.inf)
    places = {machine.name: np.array([index]) for index, machine in enumerate(machines)}
    regions = {
        region: np.array([index for index, machine in enumerate(machines) if machine.region == region])
        for region in {machine.region for machine in machines if machine.region}
    }
    for path in sorted(paths, key=lambda it: it.source in places):  # regions first: paths of machines overwrite them
        ends = [_end(name, places, regions) for name in (path.source, path.target)]
        back = path.bytes_per_second if path.back_bytes_per_second is None else path.back_bytes_per_second
        _check(path, back)
        for (source, target), bytes_per_second in (((0, 1), path.bytes_per_second), ((1, 0), back)):
            cells = np.ix_(ends[source], ends[target])
            rtt[cells], rate[cells] = path.rtt_seconds, bytes_per_second
    return fill_missing_links(rtt, rate)


def fill_missing_links(rtt_seconds: FloatArray, bytes_per_second: FloatArray) -> Links:
    """Build links with estimates for pairs without a round trip (NaN or inf); the longer of two directions counts."""
    known = np.where(np.isfinite(rtt_seconds), rtt_seconds, -1.0)
    rtt = np.maximum(known, known.T)
    np.fill_diagonal(rtt, 0.0)
    missing = rtt < 0
    if missing.any():
        edges = csr_array(np.where(missing, 0.0, np.maximum(rtt, _LEAST_RTT)))
        rtt = np.where(missing, shortest_path(edges, directed=False), rtt)
    return Links(rtt, bytes_per_second)


def transfer_rates(problem: Problem) -> FloatArray:
    """Bytes per second that transfers reach from each machine to each, 0 for pairs that cannot be neighbours, [N, N].

    Neighbours of a route need both directions, and one of them must be able to dial the other, directly or by relay.
    """
    machines = problem.machines
    up = np.array([machine.uplink_bytes_per_second for machine in machines])
    down = np.array([machine.downlink_bytes_per_second for machine in machines])
    rate = np.minimum(np.minimum(up[:, None], down[None, :]), problem.links.bytes_per_second)
    public = np.array([machine.reach is Reach.PUBLIC for machine in machines])
    outbound = np.array([machine.reach is Reach.OUTBOUND for machine in machines])
    direct = public[:, None] | public[None, :]
    relayed = ~direct & ~outbound[:, None] & ~outbound[None, :]
    rate = np.where(direct, rate, np.where(relayed, np.minimum(rate, RELAY_BYTES_PER_SECOND), 0.0))
    open_both_ways = (rate > 0) & (rate.T > 0) & np.isfinite(problem.links.rtt_seconds)
    return np.where(open_both_ways, rate * problem.training.link_efficiency, 0.0)


def islands(usable: BoolArray) -> list[list[int]]:
    """Group machines that reach each other, directly or through others; the largest group first."""
    count, labels = connected_components(csr_array(usable), directed=False)
    return sorted((np.flatnonzero(labels == label).tolist() for label in range(count)), key=len, reverse=True)


def _end(name: str, places: dict[str, np.ndarray], regions: dict[str, np.ndarray]) -> np.ndarray:
    found = places.get(name, regions.get(name))
    if found is None:
        raise PlanInputInvalid(f"a path names {name!r}, which is neither a machine nor a region")
    return found


def _check(path: MeasuredPath, back: float) -> None:
    pair = f"{path.source} – {path.target}"
    if not 0 <= path.rtt_seconds < np.inf:
        raise PlanInputInvalid(f"the round trip {pair} is {path.rtt_seconds} seconds; it must be 0 or more and finite")
    for rate in (path.bytes_per_second, back):
        if not rate >= 0:
            raise PlanInputInvalid(f"the bandwidth {pair} is {rate} bytes per second; it must be 0 or more")
