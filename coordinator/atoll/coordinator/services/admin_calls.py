"""The common part of the operator's calls. `AdminService` combines one class per subject."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from atoll.coordinator.ca import CoordinatorKeys
from atoll.coordinator.controller import Controller
from atoll.coordinator.services import views
from atoll.coordinator.services.authority_changes import AuthorityChanges
from atoll.coordinator.services.checkpoint_relay import CheckpointRelay
from atoll.coordinator.state import lookup
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import ForgottenNode, Node, Run
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import admin_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_ROUNDS = 10_000


class AdminCalls(admin_pb2_grpc.AdminServicer):
    """The parts of the coordinator that calls use, and views that several calls return."""

    def __init__(
        self,
        controller: Controller,
        uploads: CheckpointRelay,
        *,
        keys: CoordinatorKeys,
        authorities: AuthorityChanges,
        public_endpoint: str,
        stopping: asyncio.Event,
    ) -> None:
        self._controller = controller
        self._uploads = uploads
        self._keys = keys
        self._authorities = authorities
        self._public_endpoint = public_endpoint
        self._stopping = stopping

    def _known(self, known: Node | ForgottenNode) -> wire.NodeView:
        if isinstance(known, Node):
            return self._node(known)
        banned = known.peer_id in self._controller.state.deny.peer_ids
        return wire.NodeView(peer_id=known.peer_id, name=known.name, run_id=known.run_id, banned=banned)

    def _node(self, node: Node) -> wire.NodeView:
        now = self._controller.moment()
        return views.node_view(self._controller.state, node, now.unix_ms, now.monotonic)

    async def _run(self, run: Run) -> wire.RunView:
        evaluations = await self._controller.read(lambda store: store.evaluations(run.run_id))
        return views.run_view(self._present(run.run_id), run, self._controller.moment().unix_ms, evaluations)

    def _present(self, run_id: str) -> State:
        """The state now. Raises `NotFound` if the run was deleted since it was looked up."""
        state = self._controller.state
        lookup.run(state, run_id)
        return state
