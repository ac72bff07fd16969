"""Regions: clusters of near machines, from round trips; labels only break ties. Pure.

Average linkage (Sokal and Michener, 1958) does not chain machines together over single short links, and a few noisy
round trips change it little. So regions are stable while distances are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from atoll.coordinator.planner.problem import FloatArray, IntArray, Problem

REGION_SECONDS = 0.03  # a shorter round trip counts as near
_LABEL_SECONDS = 1e-4  # added to the distance of two machines with different labels
_FAR = 10.0  # seconds; used for pairs without a path


def nearness_tree(problem: Problem, machines: Sequence[int]) -> FloatArray:
    """SciPy's linkage of these machines (at least two) by round trip, [n − 1, 4]."""
    members = list(machines)
    rtt = problem.links.rtt_seconds[np.ix_(members, members)]
    labels = np.array([problem.machines[machine].region for machine in members])
    distance = np.minimum(rtt, _FAR) + _LABEL_SECONDS * (labels[:, None] != labels[None, :])
    np.fill_diagonal(distance, 0.0)
    return np.asarray(linkage(squareform(distance, checks=False), "average"))


def regions(problem: Problem, within_seconds: float = REGION_SECONDS) -> IntArray:
    """Region of each machine, [N]; numbered from 0 in the order of the regions' first machines."""
    count = len(problem.machines)
    if count == 1:
        return np.zeros(1, dtype=np.int64)
    raw = fcluster(nearness_tree(problem, range(count)), within_seconds + _LABEL_SECONDS, "distance")
    _, first, place = np.unique(raw, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return np.asarray(rank[place.reshape(-1)], dtype=np.int64)


def groups_within(problem: Problem, machines: Sequence[int], within_seconds: float) -> list[list[int]]:
    """Group machines whose average round trip is at most `within_seconds`."""
    if len(machines) < 2:
        return [list(machines)] if machines else []
    labels = fcluster(nearness_tree(problem, machines), within_seconds, "distance")
    return [[machines[int(place)] for place in np.flatnonzero(labels == label)] for label in np.unique(labels)]
