"""State of one heartbeat stream: what was received from the node, and what was sent to it.

Every response is derived from the coordinator's state; only the difference to what the node already knows is
sent. So no message can be lost or sent twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from atoll.coordinator.ca import CoordinatorKeys
from atoll.coordinator.controller import Controller
from atoll.coordinator.live import attendance
from atoll.coordinator.rounds import learner, run_pace
from atoll.coordinator.runs import admission, checkpoint_orders, forks, machine
from atoll.coordinator.services import views
from atoll.coordinator.services.checkpoint_relay import CheckpointRelay
from atoll.coordinator.services.genesis_intake import GenesisIntake
from atoll.coordinator.state import lookup, prefetch
from atoll.coordinator.state.run_memory import ForkInquiry, Inquiry
from atoll.coordinator.state.snapshot import LiveNode
from atoll.coordinator.store.records import Node
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb


class HeartbeatSession:
    """One heartbeat stream between the coordinator and a node."""

    def __init__(
        self, controller: Controller, keys: CoordinatorKeys, uploads: CheckpointRelay, peer_id: str, session: int
    ) -> None:
        self._controller = controller
        self._keys = keys
        self._uploads = uploads
        self._peer_id = peer_id
        self._session = session
        self._genesis = GenesisIntake(controller, peer_id, session)
        self._received_sequence = 0  # of the last request
        self._received_any = False
        self._moved = False  # the node moved to another run and does not know it yet: its answer was lost
        self._acknowledgement_due = False
        self._responded = False
        self._sent_plan_version = 0  # the plan version that the node has
        self._sent_genesis = False
        self._deny_number = -1
        self._authorities_number = 0
        self._seeds: tuple[str, ...] = ()
        self._last_sent: tuple[int, int, range, str, int, tuple[int, ...]] = (
            -1,
            -1,
            range(0),
            "",
            0,
            (),
        )  # run state, order, layers to prepare, notice, round of the checkpoint to write, rounds to keep
        self._asked: dict[type, tuple[int, float]] = {}  # the last question for manifests of each kind
        self._challenge = b""  # the last one that was sent
        self._ordered_uploads: set[bytes] = set()  # tickets of uploads ordered on this stream

    async def receive_requests(self, requests: AsyncIterator[mb.HeartbeatRequest], changed: asyncio.Event) -> None:
        """Apply every request as one step; set `changed` after each, and when the stream ends."""
        try:
            async for request in requests:
                if not self._received_any:
                    self._moved = request.run_id not in ("", self._run_id())
                if self._moved:  # the rest is of the old run
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
                    self._sent_plan_version = request.status.plan_version
                self._received_sequence = request.sequence
                self._acknowledgement_due = True
                changed.set()
                if request.challenge_answer:
                    self._controller.notify()  # another process of the node waits for it
        finally:
            changed.set()
            await self._genesis.close()

    def next_response(self) -> mb.HeartbeatResponse | None:
        """The response to send now; None if the node knows everything.

        Raises what ends the stream (`Banned`, `InvalidTransition`, `CorpusDiffers`).
        """
        state = self._controller.state
        node, live = machine.check_session(state, self._peer_id, self._session)
        if not self._received_any:
            return None
        if self._moved:
            return self._order_to_move()
        run = state.runs[node.run_id]
        response = mb.HeartbeatResponse(
            acknowledged_sequence=self._received_sequence,
            unix_ms=self._controller.moment().unix_ms,
            run_state=views.run_state(run),
            order=views.order_for(state, node),
            notice=attendance.corpus_notice(state, node),
            checkpoint_round=checkpoint_orders.round_to_write(state, node),
        )
        if run.genesis:
            response.known_round = run.head_round
        if (eta := run_pace.eta_of(state, run, response.unix_ms)) is not None:
            response.eta_unix_ms = eta.unix_ms
        layers = prefetch.layers_to_fetch(state, self._peer_id)
        if layers:
            response.prepare.first, response.prepare.last = layers.start, layers.stop - 1
        kept = state.memory[node.run_id].kept_rounds
        response.kept_rounds.extend(kept)
        current = (response.run_state, response.order, layers, response.notice, response.checkpoint_round, kept)
        has_news = current != self._last_sent
        has_news |= self._add_plan(response, node)
        has_news |= self._add_deny_list(response)
        has_news |= self._add_authorities(response)
        has_news |= self._add_seeds(response, node)
        has_news |= self._add_uploads(response)
        has_news |= self._add_question(response, node)
        has_news |= self._add_challenge(response, live)
        response.run_created_unix_ms = 0 if self._responded else run.created_ms
        if not self._responded and live.promised_before:
            response.promised.ParseFromString(live.promised_before)
        if not (has_news or self._acknowledgement_due):
            return None
        self._last_sent = current
        self._responded = True
        self._acknowledgement_due = False
        return response

    def _run_id(self) -> str:
        return lookup.caller(self._controller.state, self._peer_id).run_id

    def _order_to_move(self) -> mb.HeartbeatResponse | None:
        if not self._acknowledgement_due:
            return None
        self._acknowledgement_due = False
        unix_ms = self._controller.moment().unix_ms
        return mb.HeartbeatResponse(acknowledged_sequence=self._received_sequence, unix_ms=unix_ms, order=mb.ORDER_MOVE)

    def _add_plan(self, response: mb.HeartbeatResponse, node: Node) -> bool:
        run = self._controller.state.runs[node.run_id]
        if "node" not in node.roles or run.plan_version <= self._sent_plan_version:
            return False
        signed = self._controller.signed.plan(run.run_id)
        if signed is None:
            return False
        response.plan.CopyFrom(signed)
        self._sent_plan_version = plan_pb2.Plan.FromString(signed.payload).version
        if not self._sent_genesis:
            response.layers.ParseFromString(run.layers)
            response.genesis.CopyFrom(manifest_pb2.CommittedManifest.FromString(run.genesis))
            self._sent_genesis = True
        return True

    def _add_deny_list(self, response: mb.HeartbeatResponse) -> bool:
        number = self._controller.state.deny.number
        if number <= self._deny_number:
            return False
        response.deny_list.CopyFrom(self._controller.signed.deny_list)
        self._deny_number = number
        return True

    def _add_authorities(self, response: mb.HeartbeatResponse) -> bool:
        announced = self._keys.announced
        if announced is None or announced.number <= self._authorities_number:
            return False
        response.authorities.CopyFrom(announced.signed)
        self._authorities_number = announced.number
        return True

    def _add_seeds(self, response: mb.HeartbeatResponse, node: Node) -> bool:
        seeds = admission.seeds_of(self._controller.state, node.run_id)
        if set(seeds) == set(self._seeds):
            return False
        response.seeds.extend(seeds)
        self._seeds = seeds
        return True

    def _add_question(self, response: mb.HeartbeatResponse, node: Node) -> bool:
        """Ask for rounds that the coordinator lacks, or that this node has otherwise, if it is its turn."""
        memory = self._controller.state.memory[node.run_id]
        missing, contradicting = memory.inquiry, memory.fork_inquiry
        most = learner.MAX_BATCH if missing is None or missing.agreed is None else 1
        questions = ((missing, most), (contradicting, forks.BATCH))
        return any(it is not None and self._ask(response, it, count) for it, count in questions)

    def _ask(self, response: mb.HeartbeatResponse, inquiry: Inquiry | ForkInquiry, count: int) -> bool:
        kind, question = type(inquiry), (inquiry.first, inquiry.since)
        if inquiry.peer_id != self._peer_id or self._asked.get(kind) == question:
            return False
        response.manifests.first, response.manifests.count = inquiry.first, count
        self._asked[kind] = question
        return True

    def _add_challenge(self, response: mb.HeartbeatResponse, live: LiveNode) -> bool:
        """Another process claims this node's identity: this one shall show that it lives."""
        if live.challenge == self._challenge:
            return False
        response.challenge = self._challenge = live.challenge
        return True

    def _add_uploads(self, response: mb.HeartbeatResponse) -> bool:
        pending_orders = [
            item for item in self._uploads.pending_orders(self._peer_id) if item.ticket not in self._ordered_uploads
        ]
        response.uploads.extend(pending_orders)
        self._ordered_uploads |= {item.ticket for item in pending_orders}
        return bool(pending_orders)
