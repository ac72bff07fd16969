"""Time as a parameter. Pure code takes `now`; shells take a `Clock`; tests move a `ManualClock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: one for people and certificates, one for deadlines."""

    def unix(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""
        ...


class SystemClock:
    """The machine's clock."""

    def unix(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves when told to."""

    def __init__(self, unix: float = 1_700_000_000.0) -> None:
        self._unix = unix
        self._monotonic = 0.0

    def unix(self) -> float:
        return self._unix

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass on both readings."""
        self._unix += seconds
        self._monotonic += seconds


def unix_ms(clock: Clock) -> int:
    """Milliseconds since the Unix epoch, as they go on the wire."""
    return int(clock.unix() * 1000)
