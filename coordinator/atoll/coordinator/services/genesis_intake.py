"""Genesis reports of one heartbeat stream: the digests to compare are computed beside the stream, which goes on."""

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
    """Takes the report of the node that was asked for it, one at a time; a node repeats its report until a plan comes.

    The caller calls `close` in the end.
    """

    def __init__(self, controller: Controller, peer_id: str, session: int) -> None:
        self._controller = controller
        self._peer_id = peer_id
        self._session = session
        self._taking: asyncio.Task[None] | None = None
        self._closed = threading.Event()

    def offer(self, report: mb.GenesisReport) -> None:
        """Begin to take a report, unless one is being taken or none was asked for. Raises what the last one raised."""
        if self._taking is not None:
            if not self._taking.done():
                return
            self._taking.result()
        state = self._controller.state
        if views.order_for(state, lookup.caller(state, self._peer_id)) == mb.ORDER_WRITE_GENESIS:
            self._taking = asyncio.create_task(self._take(report), name="take-genesis")

    async def close(self) -> None:
        """End what is under way."""
        self._closed.set()
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)

    async def _take(self, report: mb.GenesisReport) -> None:
        zeros = await asyncio.to_thread(zero_digests, sizes_to_hash(report.layers), self._closed.is_set)
        await self._controller.do(
            lambda state, now: machine.take_genesis(state, now, self._peer_id, self._session, report, zeros)
        )
