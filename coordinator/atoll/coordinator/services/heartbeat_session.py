"""One heartbeat stream's memory: what was received, and what this node was told already.

Everything that a node may be told is derived anew from the state; only the difference to what it knows is
sent, so a push can neither be lost nor come twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from atoll.coordinator.controller import Controller
from atoll.coordinator.live import attendance
from atoll.coordinator.runs import admission, machine
from atoll.coordinator.services import views
from atoll.coordinator.services.checkpoint_relay import Uploads
from atoll.coordinator.state import prefetch
from atoll.coordinator.store.records import Node
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb


class Conversation:
    """Between the coordinator and one node, for as long as one stream lives."""

    def __init__(self, controller: Controller, uploads: Uploads, peer_id: str, session: int) -> None:
        self._controller = controller
        self._uploads = uploads
        self._peer_id = peer_id
        self._session = session
        self._received = 0  # sequence of the last request that is durable
        self._heard = False
        self._owes_answer = False
        self._plan_version = 0  # that the node has
        self._sent_genesis = False
        self._deny_number = -1
        self._seeds: tuple[str, ...] = ()
        self._told: tuple[int, int, range, str] = (-1, -1, range(0), "")  # run state, order, layers to prepare, notice
        self._tickets: set[bytes] = set()  # of uploads that were asked for on this stream

    async def listen(self, requests: AsyncIterator[mb.HeartbeatRequest], changed: asyncio.Event) -> None:
        """Take every request as one step; set `changed` after each, and when the stream ends."""
        try:
            async for request in requests:
                await self._controller.do(
                    lambda state, now, request=request: machine.heartbeat(  # type: ignore[misc]
                        state, now, self._peer_id, self._session, request
                    )
                )
                if not self._heard:
                    self._heard = True
                    self._plan_version = request.status.plan_version
                self._received = request.sequence
                self._owes_answer = True
                changed.set()
        finally:
            changed.set()

    def next_response(self) -> mb.HeartbeatResponse | None:
        """What to send now; None when the node knows everything. Raises what ends the stream (`Banned`, …)."""
        state = self._controller.state
        node, _ = machine.check_session(state, self._peer_id, self._session)
        if not self._heard:
            return None
        run = state.runs[node.run_id]
        response = mb.HeartbeatResponse(
            acknowledged_sequence=self._received,
            unix_ms=self._controller.moment().unix_ms,
            run_state=views.run_state(run),
            order=views.order_for(state, node),
            notice=attendance.corpus_notice(state, node),
        )
        layers = prefetch.told(state, self._peer_id)
        if layers:
            response.prepare.first, response.prepare.last = layers.start, layers.stop - 1
        telling = (response.run_state, response.order, layers, response.notice)
        news = telling != self._told
        news |= self._add_plan(response, node)
        news |= self._add_deny_list(response)
        news |= self._add_seeds(response, node)
        news |= self._add_uploads(response)
        if not (news or self._owes_answer):
            return None
        self._told = telling
        self._owes_answer = False
        return response

    def _add_plan(self, response: mb.HeartbeatResponse, node: Node) -> bool:
        run = self._controller.state.runs[node.run_id]
        if "node" not in node.roles or run.plan_version <= self._plan_version:
            return False
        sealed = self._controller.signed_plan(run.run_id)
        if sealed is None:
            return False
        response.plan.CopyFrom(sealed)
        self._plan_version = plan_pb2.Plan.FromString(sealed.payload).version
        if not self._sent_genesis:
            response.layers.ParseFromString(run.layers)
            response.genesis.CopyFrom(manifest_pb2.CommittedManifest.FromString(run.genesis))
            self._sent_genesis = True
        return True

    def _add_deny_list(self, response: mb.HeartbeatResponse) -> bool:
        number = self._controller.state.deny.number
        if number <= self._deny_number:
            return False
        response.deny_list.CopyFrom(self._controller.sealed_deny)
        self._deny_number = number
        return True

    def _add_seeds(self, response: mb.HeartbeatResponse, node: Node) -> bool:
        seeds = admission.seeds_of(self._controller.state, node.run_id)
        if set(seeds) == set(self._seeds):
            return False
        response.seeds.extend(seeds)
        self._seeds = seeds
        return True

    def _add_uploads(self, response: mb.HeartbeatResponse) -> bool:
        orders = [item for item in self._uploads.orders(self._peer_id) if item.ticket not in self._tickets]
        response.uploads.extend(orders)
        self._tickets |= {item.ticket for item in orders}
        return bool(orders)
