"""An Open that came too early: under a plan that has not arrived here, while another attempt is under way, or while the
round before it still is, here. Pure."""

from __future__ import annotations

from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.node.averaging.round_types import Received


class EarlyOpen:
    """Keeps the highest one, as long as its opener waits."""

    def __init__(self) -> None:
        self._kept: tuple[float, Received] | None = None

    def keep(self, received: Received, now: float, seconds: float) -> None:
        """`received` holds an Open whose opener waits that long."""
        if self._kept is not None:
            until, known = self._kept
            if now <= until and _order_of(known) >= _order_of(received):
                return
        self._kept = (now + seconds, received)

    def take(self, plan_version: int, now: float) -> Received | None:
        """What may be followed now, under that plan."""
        if self._kept is None:
            return None
        until, received = self._kept
        if now <= until and _round_of(received).plan_version > plan_version:
            return None
        self._kept = None
        return received if now <= until else None


def _order_of(received: Received) -> tuple[int, Ballot]:
    round_id = _round_of(received)
    return round_id.number, round_id.ballot


def _round_of(received: Received) -> RoundId:
    return RoundId.from_proto(received.message.open.round)
