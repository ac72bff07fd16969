"""Genesis reports of one heartbeat stream. Digests are computed in parallel, so the stream continues."""

from __future__ import annotations

import asyncio
import threading

from atoll.coordinator.controller import Controller
from atoll.coordinator.rounds.zero_digests import sizes_to_hash, zero_digests
from atoll.coordinator.runs import machine
from atoll.coordinator.services import views
from atoll.coordinator.state import lookup
from atoll.v1 import membership_pb2 as mb


class GenesisIntake:
    """Processes the report of the node that was asked to write genesis, one at a time.

    A node repeats its report until it gets a plan. The caller must call `close` at the end.
    """

    def __init__(self, controller: Controller, peer_id: str, session: int) -> None:
        self._controller = controller
        self._peer_id = peer_id
        self._session = session
        self._taking: asyncio.Task[None] | None = None
        self._closed = threading.Event()

    def offer(self, report: mb.GenesisReport) -> None:
        """Start to process a report, unless one is in progress or none was ordered. Raises the last report's error."""
        if self._taking is not None:
            if not self._taking.done():
                return
            self._taking.result()
        state = self._controller.state
        if views.order_for(state, lookup.caller(state, self._peer_id)) == mb.ORDER_WRITE_GENESIS:
            self._taking = asyncio.create_task(self._take(report), name="take-genesis")

    async def close(self) -> None:
        """Cancel the report in progress."""
        self._closed.set()
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)

    async def _take(self, report: mb.GenesisReport) -> None:
        zeros = await asyncio.to_thread(zero_digests, sizes_to_hash(report.layers), self._closed.is_set)
        await self._controller.do(
            lambda state, now: machine.take_genesis(state, now, self._peer_id, self._session, report, zeros)
        )
