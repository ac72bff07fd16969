"""How long exchanges take, and when the next round may open: exchanges must take only a small share of the time. Pure.

What a node trains during an exchange enters one round late. This share must stay small (docs/adr/0008).
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

_EXCHANGES = 5  # the last ones; an exchange that waited for a dead member says little about the next
_NEVER = float("-inf")


class ExchangeShare:
    """The last exchanges that led to a new head."""

    def __init__(self) -> None:
        self._began: float | None = None  # the last exchange since the head
        self._seconds: deque[float] = deque(maxlen=_EXCHANGES)  # from Start to the new head
        self._rest_until = _NEVER

    @property
    def usual_seconds(self) -> float:
        """The median seconds of recent exchanges; 0 if there was none."""
        return median_low(self._seconds) if self._seconds else 0.0

    def begin(self, now: float) -> None:
        """Record that the exchange of an attempt at the next round begins."""
        self._began = now

    def forget(self) -> None:
        """Forget the current exchange: the next head may not be its result."""
        self._began = None

    def commit(self, share: float, now: float) -> None:
        """Record that a round was committed. `share`: the largest share of the time that exchanges may take."""
        self._rest_until = _NEVER
        if self._began is not None:
            self._seconds.append(now - self._began)
            if share < 1:  # at share 1, exchanges may follow each other at once
                self._rest_until = self._began + self.usual_seconds / share
        self.forget()

    def is_over(self, now: float) -> bool:
        """Whether enough time has passed since the last exchange."""
        return now >= self._rest_until
