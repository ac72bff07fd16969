"""How long others take, and how long to wait for them: learnt, never set by hand. Pure.

A deadline is the median of the last durations plus k times their median absolute deviation, and at least twice the
median, between a floor and a ceiling. Until enough was seen it is the ceiling. Median and MAD shrug off the odd slow
round; waiting too long costs seconds once, giving up on a live member costs it its vote in the next round.

A deadline that was missed doubles the next one, as a lost segment doubles TCP's timer (RFC 6298 §5.5): without that a
link that grew slow would fail again and again. Where the round went on without those who missed it, it doubles once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_K = 8.0
_ENOUGH = 3  # observations before the estimate is trusted
_WINDOW = 31
_MISS_FACTOR = 1.5  # what a missed deadline is taken to have needed
_MAX_BACKOFF = 2.0**16
_ANSWERS = 5  # of one peer that are remembered
_MAX_PEERS = 1024


@dataclass
class LearnedDeadline:
    """Durations of one phase, in seconds."""

    floor_seconds: float
    ceiling_seconds: float
    _backoff: float = 1.0
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def observe(self, seconds: float) -> None:
        """How long it took until all were there."""
        self._durations.append(max(0.0, seconds))
        self._backoff = 1.0

    def observe_miss(self, seconds: float, *, failed: bool) -> None:
        """Somebody was not there after that long; `failed`: nothing came of it."""
        self._durations.append(_MISS_FACTOR * max(0.0, seconds))
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF) if failed else 2.0

    @property
    def timeout_seconds(self) -> float:
        """Seconds to wait for the next ones."""
        if len(self._durations) < _ENOUGH:
            return self.ceiling_seconds
        middle = median(self._durations)
        deviation = _MAD_TO_SIGMA * median(abs(seconds - middle) for seconds in self._durations)
        return min(
            self.ceiling_seconds, self._backoff * (self.floor_seconds + max(2 * middle, middle + _K * deviation))
        )


@dataclass
class ResponseTimes:
    """How long each of several peers took to answer, in seconds; those that did not are not in it."""

    _durations: dict[str, deque[float]] = field(default_factory=dict)

    def observe(self, peer: str, seconds: float) -> None:
        """One more answer."""
        self._durations.setdefault(peer, deque(maxlen=_ANSWERS)).append(seconds)
        if len(self._durations) > _MAX_PEERS:
            del self._durations[next(iter(self._durations))]

    def median_seconds(self, peer: str) -> float:
        """The median of its last ones; 0 while there is none."""
        return median(self._durations[peer]) if peer in self._durations else 0.0
