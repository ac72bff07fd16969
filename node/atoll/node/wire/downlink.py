"""Downlink estimate: a lower bound of this node's download rate, from all peers together.

A node cannot measure its downlink alone, and peers send only when they have data. So this takes windows of two seconds.
It ignores the largest piece of each window, because most of it may have arrived before the window began. It ignores the
best window, because data that waited while this process stood still arrives in one window. It forgets windows after an
hour. Pure: the caller passes the time.
"""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 2.0
MEMORY_SECONDS = 3600.0


class Downlink:
    """The second-best window of the last hour, in bytes per second."""

    def __init__(self) -> None:
        self._window_start = float("-inf")
        self._bytes = self._largest_piece = 0
        self._windows: deque[tuple[float, float]] = deque(maxlen=int(MEMORY_SECONDS / WINDOW_SECONDS))  # start, bytes/s

    def record(self, count: int, now: float) -> None:
        """Count bytes that were read at once."""
        if now - self._window_start >= WINDOW_SECONDS:
            self._end_window()
            self._window_start, self._bytes, self._largest_piece = now, 0, 0
        self._bytes += count
        self._largest_piece = max(self._largest_piece, count)

    def bytes_per_second(self, now: float) -> float:
        """Return the estimate; 0 if almost nothing came."""
        if now - self._window_start >= WINDOW_SECONDS:
            self._end_window()
            self._bytes = self._largest_piece = 0
        rates = sorted(rate for at, rate in self._windows if now - at <= MEMORY_SECONDS)
        return rates[-2] if len(rates) > 1 else 0.0

    def _end_window(self) -> None:
        rate = (self._bytes - self._largest_piece) / WINDOW_SECONDS
        if rate > 0:
            self._windows.append((self._window_start, rate))
