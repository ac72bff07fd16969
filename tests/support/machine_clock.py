"""Virtual time for a simulated run: what is due, in order."""

import heapq
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """Work that waits for its time. Of what is due at once, the first that was entered comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._entered = 0

    def at(self, delay: float, work: Callable[..., None], *arguments: Any) -> None:
        """Do it in `delay` seconds."""
        self._entered += 1
        heapq.heappush(self._due, (self.now + delay, self._entered, work, arguments))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; True as soon as `until` holds."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, work, arguments = heapq.heappop(self._due)
            work(*arguments)
            if until is not None and until():
                return True
        self.now = end
        return until is not None and until()
