"""How long exchanges take, and when the next round may be due for it: they shall be a small part of the time. Pure.

What is trained during an exchange enters a round late. That shall be a small part of what is trained (docs/adr/0008).
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

_EXCHANGES = 5  # the last ones: one that waited for somebody who died says little about the next
_NEVER = float("-inf")


class ExchangeShare:
    """The last exchanges that led to a new head."""

    def __init__(self) -> None:
        self._began: float | None = None  # the last one, since the head
        self._seconds: deque[float] = deque(maxlen=_EXCHANGES)  # from Start to the new head
        self._rest_until = _NEVER

    @property
    def usual_seconds(self) -> float:
        """What an exchange takes; 0: none was seen."""
        return median_low(self._seconds) if self._seconds else 0.0

    def begin(self, now: float) -> None:
        """The exchange of an attempt at the next round begins."""
        self._began = now

    def forget(self) -> None:
        """The head that comes next is not its result, as far as is known here."""
        self._began = None

    def commit(self, share: float, now: float) -> None:
        """A round was committed. `share`: of the time that exchanges may take."""
        self._rest_until = _NEVER
        if self._began is not None:
            self._seconds.append(now - self._began)
            if share < 1:  # else they may follow each other at once, also one that was quicker than most
                self._rest_until = self._began + self.usual_seconds / share
        self.forget()

    def is_over(self, now: float) -> bool:
        """Whether enough was trained since the last exchange for the next one to be a small part."""
        return now >= self._rest_until
