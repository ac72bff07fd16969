"""Share of the recent training time in which steps waited for training text. Pure."""

from __future__ import annotations

import math

MEMORY_SECONDS = 300.0  # of training; older time counts little


class StallShare:
    """An exponentially weighted share, 0 to 1. Time without training does not count."""

    def __init__(self) -> None:
        self._seconds = self._stalled = 0.0
        self._seen: tuple[float, float] | None = None  # time and stall seconds of the last call, if training ran then

    @property
    def value(self) -> float:
        """The share; 0 before any training."""
        return min(1.0, self._stalled / self._seconds) if self._seconds else 0.0

    def look(self, now: float, stall_seconds: float, training: bool) -> None:
        """Count the time since the last call, if training runs and ran then. `stall_seconds` only grows."""
        if training and self._seen is not None and now > self._seen[0]:
            passed = now - self._seen[0]
            kept = math.exp(-passed / MEMORY_SECONDS)
            self._seconds = self._seconds * kept + passed
            self._stalled = self._stalled * kept + min(passed, max(0.0, stall_seconds - self._seen[1]))
        self._seen = (now, stall_seconds) if training else None
