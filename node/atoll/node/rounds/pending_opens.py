"""Opens that came too early: their plan is not here yet, or this node is still in another attempt or an earlier round.

Pure.
"""

from __future__ import annotations

from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.node.rounds.types import Received

_Kept = tuple[float, Received]  # how long its opener waits, and the Open


class PendingOpens:
    """Keeps the highest Open of the next round, and one per member of a later round, while their openers wait."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._ahead: dict[str, _Kept] = {}  # peer → its last one, so no member displaces another's

    def keep(self, received: Received, now: float, seconds: float) -> None:
        """Keep an Open whose opener waits for `seconds`."""
        if self._kept is not None:
            until, known = self._kept
            if now <= until and _order_of(known) >= _order_of(received):
                return
        self._kept = (now + seconds, received)

    def keep_ahead(self, received: Received, now: float, seconds: float) -> None:
        """Keep an Open of a round after the next, from a member of the plan."""
        self._ahead[received.peer] = (now + seconds, received)

    def take(self, plan_version: int, number: int, now: float) -> Received | None:
        """An Open that may be followed under this plan if `number` is the next round."""
        return self._take_kept(plan_version, number, now) or self._take_ahead(number, now)

    def _take_kept(self, plan_version: int, number: int, now: float) -> Received | None:
        if self._kept is None:
            return None
        until, received = self._kept
        if now <= until and _round_of(received).plan_version > plan_version:
            return None
        self._kept = None
        return received if now <= until and _round_of(received).number >= number else None

    def _take_ahead(self, number: int, now: float) -> Received | None:
        """The first attempt of that round. The others stay for the case that it fails."""
        self._ahead = {
            peer: kept for peer, kept in self._ahead.items() if now <= kept[0] and _round_of(kept[1]).number >= number
        }
        due = [received for _, received in self._ahead.values() if _round_of(received).number == number]
        if not due:
            return None
        first = min(due, key=lambda received: _round_of(received).ballot)
        del self._ahead[first.peer]
        return first


def _order_of(received: Received) -> tuple[int, Ballot]:
    round_id = _round_of(received)
    return round_id.number, round_id.ballot


def _round_of(received: Received) -> RoundId:
    return RoundId.from_proto(received.message.open.round)
