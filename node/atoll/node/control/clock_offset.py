"""Offset of this machine's clock from the coordinator's, estimated from heartbeats. Pure.

An answer carries the coordinator's time. The estimate assumes that the answer was written in the middle of the round
trip, so its error is at most half the round trip. Of the last samples, the one with the shortest round trip counts
(the clock filter of D. Mills et al., RFC 5905 §10).
"""

from __future__ import annotations

from collections import deque

_SAMPLES_KEPT = 8
_MAX_UNANSWERED_HEARTBEATS = 64


class ClockOffset:
    """Clock offset measured by the heartbeats of one coordinator link."""

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}  # unix seconds by sequence number
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES_KEPT)  # (round trip, offset) in seconds

    def heartbeat_sent(self, sequence: int, now: float) -> None:
        """Record that a heartbeat was sent, at `now` by this machine's clock (unix seconds)."""
        self._sent[sequence] = now
        while len(self._sent) > _MAX_UNANSWERED_HEARTBEATS:
            del self._sent[next(iter(self._sent))]

    def heartbeat_answered(self, sequence: int, coordinator_unix_seconds: float, now: float) -> None:
        """Record an answer that arrived at `now`. `coordinator_unix_seconds` is 0 if the answer carries no time."""
        sent = self._sent.get(sequence)
        self._sent = {number: at for number, at in self._sent.items() if number > sequence}
        if sent is not None and coordinator_unix_seconds > 0 and now >= sent:
            self._samples.append((now - sent, (sent + now) / 2 - coordinator_unix_seconds))

    @property
    def ahead_seconds(self) -> float | None:
        """Seconds by which this machine's clock is ahead; negative if it is behind; None until measured."""
        return min(self._samples)[1] if self._samples else None
