"""Lower bound on the period of a route from the number of micro-batches that stages may have in flight. Pure.

A stage with c credits starts micro-batch k + c only after micro-batch k came back (1F1B; Narayanan et al.,
*Memory-efficient pipeline-parallel DNN training*, ICML 2021, §2.2). Each stage has 1 + `ahead` more credits than the
next stage. So between stage s and a later stage e at most (e − s) · (1 + ahead) + 1 micro-batches are in flight, each
for the time from s to e and back. The largest quotient, time over micro-batches, is a lower bound of the period (the
greatest cycle ratio of the schedule's event graph; Baccelli et al., *Synchronization and linearity*, 1992, §2.5). A
stage that may start all micro-batches of the flush at once waits for none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.planner.problem import Training


@dataclass(frozen=True)
class InFlightLimit:
    """The two stages with the largest lower bound of the period, or none: 0 seconds."""

    period_seconds: float = 0.0
    first: int = 0
    last: int = 0
    in_flight: int = 0  # most micro-batches between them

    @property
    def round_trip_seconds(self) -> float:
        """Time from the first of them to the last and back, compute included."""
        return self.period_seconds * self.in_flight


NO_IN_FLIGHT_LIMIT = InFlightLimit()


def in_flight_limit(training: Training, stages: Sequence[float], hops: Sequence[float], period: float) -> InFlightLimit:
    """Find the limit that makes the period longer than `period`, if any.

    `stages` are the seconds that a micro-batch spends in each stage; `hops`, the seconds between stages, both ways.
    """
    step = 1 + training.ahead
    if (sum(stages) + sum(hops)) / (step + 1) <= period:
        return NO_IN_FLIGHT_LIMIT
    found, worst = NO_IN_FLIGHT_LIMIT, period
    for first in range(len(stages) - 1):
        if (len(stages) - 1 - first) * step + 1 >= training.micro_batches:
            continue
        round_trip = stages[first]
        for last in range(first + 1, len(stages)):
            round_trip += hops[last - 1] + stages[last]
            count = (last - first) * step + 1
            if round_trip > worst * count:
                worst = round_trip / count
                found = InFlightLimit(worst, first, last, count)
    return found
