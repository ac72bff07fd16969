"""Clocks as parameters: pure code takes `now`, code with I/O takes a `Clock`, tests advance a `ManualClock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock time for messages and certificates; monotonic time for deadlines."""

    def unix(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary fixed point; never decreases."""
        ...


class SystemClock:
    """The machine's clock."""

    def unix(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock for tests that moves only in `advance`."""

    def __init__(self, unix: float = 1_700_000_000.0) -> None:
        self._unix = unix
        self._monotonic = 0.0

    def unix(self) -> float:
        return self._unix

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Move both readings forward by `seconds`."""
        self._unix += seconds
        self._monotonic += seconds


def unix_ms(clock: Clock) -> int:
    """Milliseconds since the Unix epoch, the unit of the wire format."""
    return int(clock.unix() * 1000)
