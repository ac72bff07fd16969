"""Openers whose attempts failed. Other openers go first, for longer each time, and all openers back off. Pure."""

from __future__ import annotations

_BACKOFF = (0.25, 5.0)  # seconds before the next attempt: after one failure, and at most
# seconds until a failed opener is followed again: after one failure, at most, at most if it was silent
_TURNS = (0.5, 2.0, 8.0)
_NEVER = float("-inf")


class FailedOpeners:
    """Failed attempts at one head under one plan."""

    def __init__(self) -> None:
        self._failures = 0
        self._not_before = _NEVER
        self._strikes: dict[str, int] = {}
        self._refused_until: dict[str, float] = {}

    def fail(self, opener: str, now: float, *, said_so: bool) -> None:
        """Record a failed attempt. `said_so`: its opener sent Abandon."""
        first, most, most_silent = _TURNS
        self._strikes[opener] = self._strikes.get(opener, 0) + 1
        self._refused_until[opener] = now + _doubled(first, self._strikes[opener], most if said_so else most_silent)
        self._failures += 1
        self._not_before = now + _doubled(_BACKOFF[0], self._failures, _BACKOFF[1])

    def must_wait(self, opener: str, now: float) -> bool:
        """Whether other openers go before this one."""
        return now < self._refused_until.get(opener, _NEVER)

    def all_must_wait(self, now: float) -> bool:
        """Whether no member may open an attempt yet."""
        return now < self._not_before


def _doubled(first: float, times: int, most: float) -> float:
    return float(min(most, first * 2 ** min(times - 1, 10)))
