"""How much one peer may make the coordinator do in a time: token buckets, as plain values. Pure.

What an honest node sends is either new and true, and then it is free, or rare. Whatever else a member sends costs
a row, an event or a look at signatures, and of those it has so many, and so many more a second.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """So many at once, and so many more a second."""

    burst: float
    per_second: float


@dataclass(frozen=True)
class Allowance:
    """What a peer used of a rate; it comes back with time."""

    used: float = 0.0
    at: float = 0.0  # monotonic

    def spend(self, rate: Rate, now: float, cost: float = 1.0) -> Allowance | None:
        """What is left after `cost` more; None when there is not enough."""
        used = max(0.0, self.used - rate.per_second * max(0.0, now - self.at)) + cost
        return Allowance(used, now) if used <= rate.burst else None


STORED_ROWS_RATE = Rate(
    256, 1.0
)  # rows that no other member vouches for: abandoned attempts, rounds that wait, losses again
REFUSED_REPORTS_RATE = Rate(32, 0.2)  # reports that are refused, an event each
MEMORY_CHANGES_RATE = Rate(
    8, 1 / 60
)  # changes of what a node says of its memory: each may have the planner search anew
ATTEMPT_RAISES_RATE = Rate(1000, 1.0)  # by how much an opener may raise the attempt promised at a round
