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
_REMEMBERED = 31
_TOO_SHORT = 1.5  # what a missed deadline is taken to have needed
_MOST_DOUBLED = 2.0**16
_ANSWERS = 5  # of one peer that are remembered
_MOST_PEERS = 1024


@dataclass
class Pace:
    """Durations of one phase, in seconds."""

    floor: float
    ceiling: float
    _factor: float = 1.0
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def observe(self, seconds: float) -> None:
        """How long it took until all were there."""
        self._seen.append(max(0.0, seconds))
        self._factor = 1.0

    def miss(self, seconds: float, *, failed: bool) -> None:
        """Somebody was not there after that long; `failed`: nothing came of it."""
        self._seen.append(_TOO_SHORT * max(0.0, seconds))
        self._factor = min(2 * self._factor, _MOST_DOUBLED) if failed else 2.0

    @property
    def patience(self) -> float:
        """Seconds to wait for the next ones."""
        if len(self._seen) < _ENOUGH:
            return self.ceiling
        middle = median(self._seen)
        deviation = _MAD_TO_SIGMA * median(abs(seconds - middle) for seconds in self._seen)
        return min(self.ceiling, self._factor * (self.floor + max(2 * middle, middle + _K * deviation)))


@dataclass
class Answers:
    """How long each of several peers took to answer, in seconds; those that did not are not in it."""

    _seen: dict[str, deque[float]] = field(default_factory=dict)

    def observe(self, peer: str, seconds: float) -> None:
        """One more answer."""
        self._seen.setdefault(peer, deque(maxlen=_ANSWERS)).append(seconds)
        if len(self._seen) > _MOST_PEERS:
            del self._seen[next(iter(self._seen))]

    def usual(self, peer: str) -> float:
        """The median of its last ones; 0 while there is none."""
        return median(self._seen[peer]) if peer in self._seen else 0.0
