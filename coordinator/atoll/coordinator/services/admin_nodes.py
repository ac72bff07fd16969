"""The operator's calls about nodes, and proofs against them. Each is one step of a state machine, or one read."""

# ruff: noqa: N802 - gRPC dictates the names of the methods

from __future__ import annotations

from atoll.coordinator.live import pinning
from atoll.coordinator.runs import admission, assignment, bans, departure, forgetting
from atoll.coordinator.services import views
from atoll.coordinator.services.admin_calls import AdminCalls, Context
from atoll.coordinator.state import lookup
from atoll.core.errors import NotFound
from atoll.v1 import admin_pb2 as wire


class NodeCalls(AdminCalls):
    """Calls of `admin.proto` about nodes and proofs."""

    async def ListNodes(self, request: wire.ListNodesRequest, context: Context) -> wire.ListNodesResponse:
        """Nodes of one run, or of all, by run and name."""
        state = self._controller.state
        run_id = lookup.run(state, request.run_id).run_id if request.run_id else ""
        nodes = [node for node in state.present_nodes() if run_id in ("", node.run_id)]
        nodes.sort(key=lambda node: (node.run_id, node.name))
        return wire.ListNodesResponse(nodes=[self._node(node) for node in nodes])

    async def GetNode(self, request: wire.GetNodeRequest, context: Context) -> wire.NodeView:
        """A node by peer id, name, or end of a peer id. Of a forgotten node: its trace, by peer id."""
        state = self._controller.state
        return self._known(lookup.known(state, request.node) or lookup.node(state, request.node))

    async def DrainNode(self, request: wire.DrainNodeRequest, context: Context) -> wire.NodeView:
        """Ask a node to finish its round and leave."""
        return self._node(await self._controller.do(lambda state, now: departure.drain(state, now, request.node)))

    async def AssignNode(self, request: wire.AssignNodeRequest, context: Context) -> wire.NodeView:
        """Order a node to move to another run."""
        return self._node(
            await self._controller.do(lambda state, now: assignment.assign(state, now, request.node, request.run_id))
        )

    async def SetProbation(self, request: wire.SetProbationRequest, context: Context) -> wire.NodeView:
        """Vouch for a node, or put it on probation."""
        return self._node(
            await self._controller.do(
                lambda state, now: admission.set_probation(state, now, request.node, on_probation=request.on_probation)
            )
        )

    async def BanNode(self, request: wire.BanNodeRequest, context: Context) -> wire.NodeView:
        """Put a node's peer id on the deny-list until it is unbanned."""
        banned = await self._controller.do(lambda state, now: bans.ban(state, now, request.node, request.reason))
        return self._known(banned)

    async def UnbanNode(self, request: wire.UnbanNodeRequest, context: Context) -> wire.NodeView:
        """Take a node's peer id off the deny-list."""
        node = await self._controller.do(lambda state, now: bans.unban(state, now, request.node))
        return self._node(node) if node is not None else wire.NodeView(peer_id=request.node)

    async def PinNode(self, request: wire.PinNodeRequest, context: Context) -> wire.NodeView:
        """Pin a node to layers, or out of the plan."""
        span = (request.span.first, request.span.last) if request.HasField("span") else None
        return self._node(await self._controller.do(lambda state, now: pinning.pin(state, now, request.node, span)))

    async def UnpinNode(self, request: wire.UnpinNodeRequest, context: Context) -> wire.NodeView:
        """Remove a node's pin."""
        return self._node(await self._controller.do(lambda state, now: pinning.unpin(state, now, request.node)))

    async def ForgetNode(self, request: wire.ForgetNodeRequest, context: Context) -> wire.ForgetNodeResponse:
        """Remove the row of a node that is gone."""
        node = await self._controller.do(
            lambda state, now: forgetting.forget(state, now, self._controller.policy, request.node)
        )
        return wire.ForgetNodeResponse(
            peer_id=node.peer_id,
            name=node.name,
            run_id=node.run_id,
            banned=node.banned,
            last_seen_unix_ms=node.last_seen_ms,
        )

    async def ListProofs(self, request: wire.ListProofsRequest, context: Context) -> wire.ListProofsResponse:
        """Proofs against members of one run, or of all."""
        state = self._controller.state
        run_id = lookup.run(state, request.run_id).run_id if request.run_id else ""
        rows = await self._controller.read(lambda store: store.proofs(run_id))
        return wire.ListProofsResponse(proofs=[views.proof_view(self._controller.state, row) for row in rows])

    async def GetProof(self, request: wire.GetProofRequest, context: Context) -> wire.ProofView:
        """A proof, with its bytes, by its id or a unique prefix of the id."""
        rows = await self._controller.read(lambda store: store.proofs(""))
        found = [row for row in rows if request.id and row.proof_id.startswith(request.id)]
        if len(found) != 1:
            which = f"{len(found)} proofs begin with" if found else "no proof begins with"
            raise NotFound(f"{which} {request.id!r}", "see `atollctl trust list`")
        view = views.proof_view(self._controller.state, found[0])
        view.proof = found[0].proof
        return view
