"""Members whose connections to this node broke, until the next message from them."""

from __future__ import annotations

from dataclasses import replace

from atoll.core.clock import Clock
from atoll.core.manifest import Head
from atoll.core.plan import Plan

_LOST_SECONDS = 5.0  # a member counts as gone after this long


class LostMembers:
    """Records when each member's connection broke."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lost_at: dict[str, float] = {}  # peer id → monotonic

    def hear(self, peer: str) -> None:
        """Record a sign of life of a member."""
        self._lost_at.pop(peer, None)

    def lose(self, peer: str) -> None:
        """Record that a member's connection broke."""
        self._lost_at.setdefault(peer, self._clock.monotonic())

    def others_can_decide(self, plan: Plan, head: Head) -> bool:
        """Return whether the members of the plan that are not gone can commit a round."""
        now = self._clock.monotonic()
        gone = {peer for peer, at in self._lost_at.items() if now - at >= _LOST_SECONDS}
        left = tuple(item for item in plan.assignments if item.peer_id not in gone)
        return replace(plan, assignments=left).can_decide(head)
