"""Rate limits of what one peer may cost the coordinator: token buckets as plain values. Pure.

A correct node's messages are free or rare. Any other message costs a row, an event or a signature check. Each peer may
cause a burst of these, which refills at a constant rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """A bucket's size, and its refill per second."""

    burst: float
    per_second: float


@dataclass(frozen=True)
class Allowance:
    """Used part of a rate; it refills with time."""

    used: float = 0.0
    at: float = 0.0  # monotonic

    def spend(self, rate: Rate, now: float, cost: float = 1.0) -> Allowance | None:
        """The allowance after `cost` more; None if too little is left."""
        used = self._used_at(rate, now) + cost
        return Allowance(used, now) if used <= rate.burst else None

    def charge(self, rate: Rate, now: float, cost: float) -> Allowance:
        """The allowance after `cost` more. If it exceeds the burst, the excess is a debt."""
        return Allowance(self._used_at(rate, now) + cost, now)

    def debt_seconds(self, rate: Rate, now: float) -> float:
        """Seconds until the debt is refilled; 0 if there is none."""
        return max(0.0, self._used_at(rate, now) - rate.burst) / rate.per_second

    def is_full(self, rate: Rate, now: float) -> bool:
        """True if the whole burst is available."""
        return self._used_at(rate, now) == 0

    def _used_at(self, rate: Rate, now: float) -> float:
        return max(0.0, self.used - rate.per_second * max(0.0, now - self.at))


# Rows that no other member confirms: abandoned attempts, repeated losses.
STORED_ROWS_RATE = Rate(256, 1.0)
METRICS_RATE = Rate(1024, 4.0)  # metrics of rounds; a node sends many at once after the coordinator was down
REFUSED_REPORTS_RATE = Rate(32, 0.2)  # rejected reports; each is an event
MEMORY_CHANGES_RATE = Rate(8, 1 / 60)  # changes of the reported memory; each may start a planner search
ATTEMPT_RAISES_RATE = Rate(1000, 1.0)  # attempts by which an opener may raise the attempt that the coordinator promised
CALLS_RATE = Rate(1024, 16.0)  # calls and messages on streams; a node sends one heartbeat a second
CALL_BYTES = 32 << 10  # bytes of a message that cost as much as one more message
