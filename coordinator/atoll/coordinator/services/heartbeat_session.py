"""State of one heartbeat stream: requests received from the node, and updates due to it (`NodeUpdates`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from atoll.coordinator.ca import CoordinatorKeys
from atoll.coordinator.controller import Controller
from atoll.coordinator.runs import machine
from atoll.coordinator.services.checkpoint_relay import CheckpointRelay
from atoll.coordinator.services.genesis_intake import GenesisIntake
from atoll.coordinator.services.node_updates import NodeUpdates
from atoll.coordinator.state import lookup
from atoll.v1 import membership_pb2 as mb


class HeartbeatSession:
    """One heartbeat stream between the coordinator and a node."""

    def __init__(
        self, controller: Controller, keys: CoordinatorKeys, uploads: CheckpointRelay, peer_id: str, session: int
    ) -> None:
        self._controller = controller
        self._peer_id = peer_id
        self._session = session
        self._genesis = GenesisIntake(controller, peer_id, session)
        self._updates = NodeUpdates(controller, keys, uploads, peer_id)
        self._received_sequence = 0  # of the last request
        self._received_any = False
        self._moved = False  # the node moved to another run but does not know it, because the answer was lost
        self._acknowledgement_due = False

    async def receive_requests(self, requests: AsyncIterator[mb.HeartbeatRequest], changed: asyncio.Event) -> None:
        """Apply every request as one step; set `changed` after each, and when the stream ends."""
        try:
            async for request in requests:
                if not self._received_any:
                    self._moved = request.run_id not in ("", self._run_id())
                if self._moved:  # all other fields are about the old run
                    request = mb.HeartbeatRequest(sequence=request.sequence, challenge_answer=request.challenge_answer)
                await self._controller.do(
                    lambda state, now, request=request: machine.heartbeat(  # type: ignore[misc]
                        state, now, self._peer_id, self._session, request
                    )
                )
                if request.HasField("genesis"):
                    self._genesis.offer(request.genesis)
                if not self._received_any:
                    self._received_any = True
                    self._updates.node_has_plan(request.status.plan_version)
                self._received_sequence = request.sequence
                self._acknowledgement_due = True
                changed.set()
                if request.challenge_answer:
                    self._controller.notify()  # another process of the node waits for the answer
        finally:
            changed.set()
            await self._genesis.close()

    def next_response(self) -> mb.HeartbeatResponse | None:
        """The response to send now; None if there is nothing new for the node.

        Raises the error that ends the stream (`Banned`, `InvalidTransition`, `CorpusDiffers`).
        """
        state = self._controller.state
        node, live = machine.check_session(state, self._peer_id, self._session)
        if not self._received_any:
            return None
        if self._moved:
            return self._order_to_move()
        response = self._acknowledgement()
        if not (self._updates.add(response, state, node, live) or self._acknowledgement_due):
            return None
        self._acknowledgement_due = False
        return response

    def _acknowledgement(self) -> mb.HeartbeatResponse:
        unix_ms = self._controller.moment().unix_ms
        return mb.HeartbeatResponse(acknowledged_sequence=self._received_sequence, unix_ms=unix_ms)

    def _run_id(self) -> str:
        return lookup.caller(self._controller.state, self._peer_id).run_id

    def _order_to_move(self) -> mb.HeartbeatResponse | None:
        if not self._acknowledgement_due:
            return None
        self._acknowledgement_due = False
        response = self._acknowledgement()
        response.order = mb.ORDER_MOVE
        return response
