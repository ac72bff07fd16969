"""Opens that came too early: under a plan that has not arrived here, or while another attempt or an earlier round is
under way here. Pure."""

from __future__ import annotations

from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.node.rounds.types import Received

_Kept = tuple[float, Received]  # until when its opener waits


class PendingOpens:
    """Of the next round the highest one, and of each member one of a round after that; as long as its opener waits."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._ahead: dict[str, _Kept] = {}  # peer → its last one: nobody takes the place of another's

    def keep(self, received: Received, now: float, seconds: float) -> None:
        """`received` holds an Open whose opener waits that long."""
        if self._kept is not None:
            until, known = self._kept
            if now <= until and _order_of(known) >= _order_of(received):
                return
        self._kept = (now + seconds, received)

    def keep_ahead(self, received: Received, now: float, seconds: float) -> None:
        """Of a round after the next, from a member of the plan."""
        self._ahead[received.peer] = (now + seconds, received)

    def take(self, plan_version: int, number: int, now: float) -> Received | None:
        """What may be followed now, under that plan, where that round is the next."""
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
        """The first attempt of that round: the others follow when it failed."""
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
