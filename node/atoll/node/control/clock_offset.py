"""How far this machine's clock is from the coordinator's: four times of a heartbeat, the one with the shortest way.

The coordinator's answer tells when it was written. Half of what the way there and back took belongs to each way, which
is wrong by half of that at most, so the shortest of the last is believed (D. Mills et al., RFC 5905 §10). Pure.
"""

from __future__ import annotations

from collections import deque

_SAMPLES_KEPT = 8
_MAX_UNANSWERED_HEARTBEATS = 64  # heartbeats without an answer


class ClockOffset:
    """Filled with one line's heartbeats."""

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}  # by sequence: unix seconds
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES_KEPT)  # round trip, offset; seconds

    def sent(self, sequence: int, now: float) -> None:
        """A heartbeat is on its way, at `now` by this machine's clock (unix seconds)."""
        self._sent[sequence] = now
        while len(self._sent) > _MAX_UNANSWERED_HEARTBEATS:
            del self._sent[next(iter(self._sent))]

    def answered(self, sequence: int, coordinator: float, now: float) -> None:
        """It was answered, at `coordinator` by the coordinator's clock; 0 of one that does not tell."""
        began = self._sent.get(sequence)
        self._sent = {number: at for number, at in self._sent.items() if number > sequence}
        if began is not None and coordinator > 0 and now >= began:
            self._samples.append((now - began, (began + now) / 2 - coordinator))

    @property
    def seconds(self) -> float | None:
        """By which this machine's clock is ahead; below 0: behind; None until it is known."""
        return min(self._samples)[1] if self._samples else None
