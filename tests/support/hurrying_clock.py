"""A clock for tests of patience: it is over when something has happened, not when this machine stood still."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.clock import SystemClock


class HurryingClock(SystemClock):
    """The system's, but `seconds` later as soon as `happened()` is true."""

    def __init__(self, happened: Callable[[], object], seconds: float = 3600.0) -> None:
        self._happened, self._seconds = happened, seconds

    def monotonic(self) -> float:
        return super().monotonic() + (self._seconds if self._happened() else 0.0)
