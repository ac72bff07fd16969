"""Limits on each member's calls: a token bucket of calls, messages and bytes (`CALLS_RATE`).

A member that sends too much on a stream is slowed down: its next message is not read yet, and gRPC's flow control stops
the sender. A call that begins during that time is refused as `Busy`. All calls and streams of a member share one
allowance.
"""

from __future__ import annotations

import asyncio

from atoll.coordinator.state.rate_limits import CALL_BYTES, CALLS_RATE, Allowance
from atoll.core.clock import Clock
from atoll.core.errors import Busy

_FEW_MEMBERS = 1024  # with fewer members, no allowance is forgotten


class CallRates:
    """Allowances by peer id; full ones are forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}
        self._forget_above = _FEW_MEMBERS

    def begin_call(self, peer_id: str) -> None:
        """Charge a call. Raises `Busy` if the member has sent too much."""
        seconds = self._debt_seconds(peer_id)
        if seconds > 0:
            raise Busy(f"this node has sent too much; calls are refused for {seconds:.1f} s", "try again then")
        self.charge(peer_id, 0)

    def charge(self, peer_id: str, message_bytes: int) -> None:
        """Charge a message that has arrived."""
        cost = 1 + message_bytes / CALL_BYTES
        before = self._allowances.get(peer_id, Allowance())
        self._allowances[peer_id] = before.charge(CALLS_RATE, self._clock.monotonic(), cost)
        if len(self._allowances) > self._forget_above:
            self._forget_full()

    async def wait(self, peer_id: str) -> None:
        """Wait until the member's allowance is no longer negative."""
        await asyncio.sleep(self._debt_seconds(peer_id))

    def _debt_seconds(self, peer_id: str) -> float:
        return self._allowances.get(peer_id, Allowance()).debt_seconds(CALLS_RATE, self._clock.monotonic())

    def _forget_full(self) -> None:
        now = self._clock.monotonic()
        self._allowances = {peer: kept for peer, kept in self._allowances.items() if not kept.is_full(CALLS_RATE, now)}
        self._forget_above = max(_FEW_MEMBERS, 2 * len(self._allowances))
