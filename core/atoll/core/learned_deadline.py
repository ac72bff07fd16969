"""Timeouts that are learned from observed durations instead of configured. Pure.

A timeout is a floor plus the larger of two values: twice the median of the last durations, or the median plus k times
their median absolute deviation (MAD). A ceiling bounds it. Until there are enough observations, the timeout is the one
that another node gave this phase, or the ceiling. Median and MAD are robust against single slow rounds. A timeout that
is too long costs some seconds once; one that is too short costs a live member its vote in the next round.

A missed timeout doubles the next one, as a lost segment doubles TCP's timer (RFC 6298 §5.5). Otherwise a link that
became slow would fail repeatedly. If the round continued without the late peers, the timeout doubles only once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_MAD_TO_SIGMA = 1.4826  # factor for a normal distribution
_K = 8.0
_ENOUGH = 3  # observations before the estimate replaces the ceiling
_WINDOW = 31
_MISS_FACTOR = 1.5  # a missed timeout counts as this multiple of its duration
_MAX_BACKOFF = 2.0**16
_ANSWERS = 5  # remembered for each peer
_MAX_PEERS = 1024


@dataclass
class LearnedDeadline:
    """Timeout of one phase, learned from its durations in seconds."""

    floor_seconds: float
    ceiling_seconds: float
    _backoff: float = 1.0
    _suggested: float | None = None
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def observe(self, seconds: float) -> None:
        """Record how long the phase took until every peer was done."""
        self._durations.append(max(0.0, seconds))
        self._backoff = 1.0

    def observe_miss(self, seconds: float, *, failed: bool) -> None:
        """Record that a peer was not done after `seconds`. `failed`: the phase had no result without that peer."""
        self._durations.append(_MISS_FACTOR * max(0.0, seconds))
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF) if failed else 2.0

    def suggest(self, seconds: float) -> None:
        """Record the timeout that another node gave this phase. It is used until there are enough observations here."""
        self._suggested = seconds

    @property
    def timeout_seconds(self) -> float:
        """Seconds to wait in the next phase."""
        if len(self._durations) < _ENOUGH:
            seconds = self.ceiling_seconds if self._suggested is None else max(self._suggested, self.floor_seconds)
            return min(self.ceiling_seconds, self._backoff * seconds)
        middle = median(self._durations)
        deviation = _MAD_TO_SIGMA * median(abs(seconds - middle) for seconds in self._durations)
        return min(
            self.ceiling_seconds, self._backoff * (self.floor_seconds + max(2 * middle, middle + _K * deviation))
        )


@dataclass
class ResponseTimes:
    """Response times by peer, in seconds. A peer that never answered has none."""

    _durations: dict[str, deque[float]] = field(default_factory=dict)

    def observe(self, peer: str, seconds: float) -> None:
        """Record one response time."""
        self._durations.setdefault(peer, deque(maxlen=_ANSWERS)).append(seconds)
        if len(self._durations) > _MAX_PEERS:
            del self._durations[next(iter(self._durations))]

    def median_seconds(self, peer: str) -> float:
        """Return the median of the peer's last response times; 0 if there are none."""
        return median(self._durations[peer]) if peer in self._durations else 0.0
