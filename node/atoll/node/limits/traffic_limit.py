"""Limits of traffic to and from peers: rates, and an allowance by calendar month."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from atoll.core.clock import Clock
from atoll.core.errors import AtollError
from atoll.node.config import NodeConfig
from atoll.node.limits.owner_files import MonthlyTraffic

TRAFFIC_SAVE_INTERVAL = timedelta(seconds=60)  # a crash loses at most the count of this time
_BYTES_PER_MBIT = 1e6 / 8


class TrafficLimiter(Protocol):
    """Counts and limits the bytes to and from peers."""

    @property
    def bytes_total(self) -> int: ...
    def limit(self, upload_bytes_per_second: float, download_bytes_per_second: float) -> None: ...
    def set_remaining_bytes(self, more_bytes: float) -> None: ...


class TrafficLimit:
    """Counts a node's traffic by calendar month and applies its owner's limits to a `TrafficLimiter`."""

    def __init__(self, data_dir: Path, clock: Clock) -> None:
        self.month_bytes = 0
        self._month = MonthlyTraffic(data_dir)
        self._clock = clock
        self._saved_at_monotonic = clock.monotonic()

    def limit_rates(self, limiter: TrafficLimiter, config: NodeConfig) -> None:
        """Apply the rates of `config`; 0 means no limit."""
        up, down = config.upload_mbit_per_second, config.download_mbit_per_second
        limiter.limit(up * _BYTES_PER_MBIT, down * _BYTES_PER_MBIT)

    def count(self, limiter: TrafficLimiter) -> None:
        """Add the traffic since the last call to this month's."""
        self.month_bytes = self._month.count(limiter.bytes_total, local_time(self._clock))

    def set_remaining(self, limiter: TrafficLimiter, monthly_bytes: float) -> None:
        """Give the limiter the bytes left this month, so that traffic between two observations cannot exceed them.

        `monthly_bytes` of 0 lifts the limit.
        """
        self.count(limiter)
        limiter.set_remaining_bytes(monthly_bytes - self.month_bytes if monthly_bytes else math.inf)

    def save_is_due(self) -> bool:
        """Return whether the last save was `TRAFFIC_SAVE_INTERVAL` ago."""
        return self._clock.monotonic() - self._saved_at_monotonic >= TRAFFIC_SAVE_INTERVAL.total_seconds()

    def save(self) -> str:
        """Save the counts; return a warning for people if that fails, else ""."""
        self._saved_at_monotonic = self._clock.monotonic()
        try:
            self._month.save()
        except AtollError as error:
            return f"this month's traffic was not saved; a restart will not count it: {error}"
        return ""


def local_time(clock: Clock) -> datetime:
    """Return the time of the owner's wall clock."""
    return datetime.fromtimestamp(clock.unix()).astimezone()
