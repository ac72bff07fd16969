"""How much came in at most, of all peers together: what the link carries at least. Pure: it is told the time.

Nobody can measure a downlink alone, and others send when they have something. So this is a lower bound, of windows of
two seconds. The largest piece of each is left out, because most of it may have come before; and the best window,
because all that waited while this process stood still comes in one. What was seen is forgotten after an hour.
"""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 2.0
MEMORY_SECONDS = 3600.0


class Downlink:
    """Fed with what came."""

    def __init__(self) -> None:
        self._began = float("-inf")  # of the window
        self._bytes = self._largest = 0
        self._windows: deque[tuple[float, float]] = deque(maxlen=int(MEMORY_SECONDS / WINDOW_SECONDS))  # when, bytes/s

    def record(self, count: int, now: float) -> None:
        """So many bytes were read at once."""
        if now - self._began >= WINDOW_SECONDS:
            self._end_window()
            self._began, self._bytes, self._largest = now, 0, 0
        self._bytes += count
        self._largest = max(self._largest, count)

    def bytes_per_second(self, now: float) -> float:
        """0: nothing worth speaking of came."""
        if now - self._began >= WINDOW_SECONDS:
            self._end_window()
            self._bytes = self._largest = 0
        rates = sorted(rate for at, rate in self._windows if now - at <= MEMORY_SECONDS)
        return rates[-2] if len(rates) > 1 else 0.0

    def _end_window(self) -> None:
        rate = (self._bytes - self._largest) / WINDOW_SECONDS
        if rate > 0:
            self._windows.append((self._began, rate))
