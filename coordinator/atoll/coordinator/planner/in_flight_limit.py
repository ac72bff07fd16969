"""How far apart micro-batches must follow each other because stages may only have so many in flight. Pure.

A stage that has c credits takes micro-batch k + c forward only after k came back (1F1B; Narayanan et al.,
*Memory-efficient pipeline-parallel DNN training*, ICML 2021, §2.2), and each stage has 1 + `ahead` more of them than
the next. So between stage s and a later one e, (e − s) · (1 + ahead) + 1 micro-batches are on their way at most, each
for as long as it takes from s to e and back. The longest such time a micro-batch is the least period (the greatest
cycle ratio of the schedule's event graph; Baccelli et al., *Synchronization and linearity*, 1992, §2.5). A stage that
may take all micro-batches of the flush at once waits for none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.planner.problem import Training


@dataclass(frozen=True)
class InFlightLimit:
    """The pair of stages that is the least covered, or none: 0 seconds."""

    period_seconds: float = 0.0
    first: int = 0
    last: int = 0
    in_flight: int = 0  # between them, at most

    @property
    def round_trip_seconds(self) -> float:
        """From the first to the last of them and back, computing included."""
        return self.period_seconds * self.in_flight


NO_IN_FLIGHT_LIMIT = InFlightLimit()


def in_flight_limit(training: Training, stages: Sequence[float], hops: Sequence[float], period: float) -> InFlightLimit:
    """What binds beyond `period`. `stages`: seconds that a micro-batch spends in each; `hops`: between, both ways."""
    step = 1 + training.ahead
    if (sum(stages) + sum(hops)) / (step + 1) <= period:
        return NO_IN_FLIGHT_LIMIT
    found, worst = NO_IN_FLIGHT_LIMIT, period
    for first in range(len(stages) - 1):
        if (len(stages) - 1 - first) * step + 1 >= training.micro_batches:
            continue
        way = stages[first]
        for last in range(first + 1, len(stages)):
            way += hops[last - 1] + stages[last]
            count = (last - first) * step + 1
            if way > worst * count:
                worst = way / count
                found = InFlightLimit(worst, first, last, count)
    return found
