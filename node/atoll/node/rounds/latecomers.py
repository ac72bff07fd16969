"""Which members are about to reach the newest head, and how long the next round waits for them. Pure bookkeeping.

A member that missed a round fetches its state while the others make the next round. If the fetch takes as long as a
round, the member would always be one round behind. So the next round waits for a late member: one that reported an
older head, or that reached the newest head after an attempt began. The wait is twice the time that the member took last
time, from the commit here to its report. If that is too short, a later round waits for it again.

All waits together take at most a tenth of the time, and at most `most` seconds at once. So members that lie, freeze or
are too slow delay the others by no more than that.
"""

from __future__ import annotations

from collections.abc import Set

from atoll.core.manifest import Head
from atoll.core.plan import Plan

_AWAIT = 2  # times the member's last delay, or an exchange if that is longer
_AWAIT_AGAIN = 5  # rounds until a member that is still late is waited for again; doubled each time
_SHARE = 0.1  # of the time
_HEADS = 64  # a member that is further behind is not waited for


class Latecomers:
    """What one member knows of the members behind it."""

    def __init__(self, most: float, now: float) -> None:
        self._most = most
        self._left, self._left_at = most, now  # seconds left for waits, and when this was computed
        self._since = self._until = now  # start and end of the last wait, already subtracted from the seconds left
        self._moved: dict[int, float] = {}  # round → when it was committed here
        # peer → our head's round when it reported, and its delay in seconds
        self._took: dict[str, tuple[int, float]] = {}
        # peer → the first round that may wait again, and the pause after that in rounds
        self._again: dict[str, tuple[int, int]] = {}
        self._awaited: frozenset[str] = frozenset()

    def see(self, peer: str, round: int, head: Head, now: float) -> None:
        """Record that `peer` reports only now that it is at `round`, which is our head's or an earlier one."""
        installs = round < head.round and peer in head.present  # it holds our head's state and is about to install it
        if round in self._moved and not installs:
            self._took[peer] = head.round, now - self._moved[round]

    def lose(self, peer: str) -> None:
        """Forget a member whose connection broke."""
        self._took.pop(peer, None)
        self._awaited -= {peer}

    def move(self, head: Head, now: float) -> None:
        """Record a commit. Members that took part in it are not late any more."""
        self.end(head, now)
        if head.round <= max(self._moved, default=-1):  # a recovery
            self._moved.clear()
            self._again.clear()
        self._moved[head.round] = now
        for old in list(self._moved)[:-_HEADS]:
            del self._moved[old]
        self._took = {peer: it for peer, it in self._took.items() if it[0] == head.round - 1}
        for peer in head.present:
            self._took.pop(peer, None)
            self._again.pop(peer, None)

    def begin(self, head: Head, plan: Plan, exchange_seconds: float, now: float, peer: str = "") -> None:
        """Wait for members that were late at the last head, while the time for waits allows it; or only for `peer`."""
        self._left = min(self._most, self._left + _SHARE * (now - self._left_at))
        self._left_at = now
        self._awaited &= plan.stages
        for late in (peer,) if peer else sorted(self._took, key=lambda late: self._took[late][1]):
            if late not in self._took or late in self._awaited or late not in plan.stages or late in plan.on_probation:
                continue
            not_before, _ = self._again.get(late, (head.round, 0))
            until = max(self._until, now + _AWAIT * max(self._took[late][1], exchange_seconds))
            cost = until - max(self._until, now)
            if not_before <= head.round and cost <= self._left:
                self._left -= cost
                self._since = self._since if self._awaited else now
                self._until = until
                self._awaited |= {late}

    def end(self, head: Head, now: float) -> None:
        """End the wait, because a round opens or was committed. Unused seconds are returned."""
        # the wait was long enough for a member as slow as last time
        if now - self._since >= (self._until - self._since) / 2:
            for peer in self._awaited:
                _, rounds = self._again.get(peer, (0, _AWAIT_AGAIN))
                self._again[peer] = head.round + rounds, 2 * rounds
        self._left += max(0.0, self._until - now)
        self._until, self._awaited = now, frozenset()

    def are_awaited(self, there: Set[str], now: float) -> bool:
        """Whether a due round still waits. `there`: the members that reported at this head."""
        return now < self._until and not self._awaited <= there
