"""Which members are on their way to the newest head, and how long the next round waits for them. Pure bookkeeping.

A member that missed a round fetches its state while the others make the next one. If that takes as long as a round, it
would be one round behind for ever. So the next round waits for a member that was seen on its way: it told of an older
head, or came to the newest one when an attempt was under way already. It gets twice what it took the last time, from
the commit here to its word that it is there. If that is not enough, a later round waits for it again.

All such waits together take at most a tenth of the time, and `most` seconds at once. So members that lie, freeze or are
too slow do not hold up the others for longer than that.
"""

from __future__ import annotations

from collections.abc import Set

from atoll.core.manifest import Head
from atoll.core.plan import Plan

_AWAIT = 2  # times what it took, or an exchange if that is longer
_AWAIT_AGAIN = 5  # rounds after which a member that is still late is waited for once more; twice as many each time
_SHARE = 0.1  # of the time
_HEADS = 64  # whoever is further behind is not waited for


class Latecomers:
    """What one member knows of those that are behind it."""

    def __init__(self, most: float, now: float) -> None:
        self._most = most
        self._left, self._left_at = most, now  # seconds that waits may take, and when that was so
        self._since = self._until = now  # of the last wait, which is paid for
        self._moved: dict[int, float] = {}  # round → when it was committed here
        self._took: dict[str, tuple[int, float]] = {}  # peer → where we stood when it was seen, and its seconds
        self._again: dict[str, tuple[int, int]] = {}  # peer → not before that round, and for how many then
        self._awaited: frozenset[str] = frozenset()

    def see(self, peer: str, round: int, head: Head, now: float) -> None:
        """`peer` says only now that it stands at that round, which is our head or an earlier one."""
        installs = round < head.round and peer in head.present  # it holds our head's state: it is about to be there
        if round in self._moved and not installs:
            self._took[peer] = head.round, now - self._moved[round]

    def lose(self, peer: str) -> None:
        """Its connection broke."""
        self._took.pop(peer, None)
        self._awaited -= {peer}

    def move(self, head: Head, now: float) -> None:
        """A round was committed: whoever had a part in it is not late any more."""
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
        """Wait for those that were seen lately, as long as there is time left for that; or only for one of them."""
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
        """The wait is over: a round is opened, or was committed. What is not used may be used later."""
        if now - self._since >= (self._until - self._since) / 2:  # enough for those that come as soon as the last time
            for peer in self._awaited:
                _, rounds = self._again.get(peer, (0, _AWAIT_AGAIN))
                self._again[peer] = head.round + rounds, 2 * rounds
        self._left += max(0.0, self._until - now)
        self._until, self._awaited = now, frozenset()

    def are_awaited(self, there: Set[str], now: float) -> bool:
        """Whether a round that is due waits. `there`: those that were heard from at this head."""
        return now < self._until and not self._awaited <= there
