"""Updates for a node on its heartbeat stream. Only what the node does not have yet is sent.

All updates are derived from the coordinator's state, so none can be lost or sent twice.
"""

from __future__ import annotations

from atoll.coordinator.ca import CoordinatorKeys
from atoll.coordinator.controller import Controller
from atoll.coordinator.live import attendance
from atoll.coordinator.rounds import learner, run_pace
from atoll.coordinator.runs import admission, checkpoint_orders, forks
from atoll.coordinator.services import views
from atoll.coordinator.services.checkpoint_relay import CheckpointRelay
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.run_memory import ForkInquiry, Inquiry
from atoll.coordinator.state.snapshot import LiveNode, State
from atoll.coordinator.store.records import Node
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb


class NodeUpdates:
    """Adds to each response the updates that its node does not have yet."""

    def __init__(self, controller: Controller, keys: CoordinatorKeys, uploads: CheckpointRelay, peer_id: str) -> None:
        self._controller = controller
        self._keys = keys
        self._uploads = uploads
        self._peer_id = peer_id
        self._state = controller.state
        self._responded = False
        self._sent_plan_version = 0  # the plan version that the node has
        self._sent_genesis = False
        self._deny_number = -1
        self._authorities_number = 0
        self._seeds: tuple[str, ...] = ()
        self._sent_orders: tuple[object, ...] = ()
        self._asked: dict[type, tuple[int, float]] = {}  # the last request for manifests of each kind
        self._challenge = b""  # the last one that was sent
        self._ordered_uploads: set[bytes] = set()  # tickets of uploads ordered on this stream

    def node_has_plan(self, version: int) -> None:
        """Record the plan version that the node has from an earlier stream."""
        self._sent_plan_version = version

    def add(self, response: mb.HeartbeatResponse, state: State, node: Node, live: LiveNode) -> bool:
        """Add all updates. Returns False if nothing is new, so that the response may be left out."""
        self._state = state  # one for the whole response
        news = (
            self._add_orders(response, node),
            self._add_plan(response, node),
            self._add_deny_list(response),
            self._add_authorities(response),
            self._add_seeds(response, node),
            self._add_uploads(response),
            self._add_question(response, node),
            self._add_challenge(response, live),
        )
        self._add_progress(response, node)
        if not self._responded:
            self._add_facts_for_start(response, node, live)
            self._responded = True
        return any(news)

    def _add_facts_for_start(self, response: mb.HeartbeatResponse, node: Node, live: LiveNode) -> None:
        response.run_created_unix_ms = self._state.runs[node.run_id].created_ms
        if live.promised_before:
            response.promised.ParseFromString(live.promised_before)

    def _add_orders(self, response: mb.HeartbeatResponse, node: Node) -> bool:
        """Add the orders, which are in every response. Returns whether one has changed."""
        state = self._state
        response.run_state = views.run_state(state.runs[node.run_id])
        response.order = views.order_for(state, node)
        response.notice = attendance.corpus_notice(state, node)
        response.checkpoint_round = checkpoint_orders.round_to_write(state, node)
        layers = prefetch.layers_to_fetch(state, self._peer_id)
        if layers:
            response.prepare.first, response.prepare.last = layers.start, layers.stop - 1
        kept = state.memory[node.run_id].kept_rounds
        response.kept_rounds.extend(kept)
        orders = (response.run_state, response.order, layers, response.notice, response.checkpoint_round, kept)
        changed, self._sent_orders = orders != self._sent_orders, orders
        return changed

    def _add_progress(self, response: mb.HeartbeatResponse, node: Node) -> None:
        """Add progress, which is in every response but is no reason to send one."""
        state = self._state
        run = state.runs[node.run_id]
        if run.genesis:
            response.known_round = run.head_round
        if (eta := run_pace.eta_of(state, run, response.unix_ms)) is not None:
            response.eta_unix_ms = eta.unix_ms
        memory = state.memory[node.run_id]
        if (credit := memory.credits.get(self._peer_id)) is not None:
            response.credit.tokens, response.credit.rounds = credit.tokens, credit.rounds
            response.credit.rank, response.credit.nodes = memory.credit_ranks[self._peer_id], len(memory.credit_ranks)

    def _add_plan(self, response: mb.HeartbeatResponse, node: Node) -> bool:
        run = self._state.runs[node.run_id]
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
        number = self._state.deny.number
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
        seeds = admission.seeds_of(self._state, node.run_id)
        if set(seeds) == set(self._seeds):
            return False
        response.seeds.extend(seeds)
        self._seeds = seeds
        return True

    def _add_question(self, response: mb.HeartbeatResponse, node: Node) -> bool:
        """Ask the node for rounds that the coordinator lacks or that contradict the log, if it is the node's turn."""
        memory = self._state.memory[node.run_id]
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
        """Send the challenge by which this process must prove that it is alive, because another claims the identity."""
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
