"""`AdminService`, the operator's gRPC service.

A thin layer: each call is one step of a state machine, or one read of the state or the store.
"""

# ruff: noqa: N802 - gRPC dictates the names of the methods

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from atoll.coordinator.ca import CoordinatorKeys
from atoll.coordinator.controller import Controller
from atoll.coordinator.interceptors import refuse_retired
from atoll.coordinator.live import pinning, plan_apply
from atoll.coordinator.runs import (
    admission,
    assignment,
    bans,
    checkpoint_orders,
    checkpoints,
    deletion,
    departure,
    forgetting,
    fork_source,
    lifecycle,
    recovery,
)
from atoll.coordinator.services import plan_views, views
from atoll.coordinator.services.authority_changes import AuthorityChanges
from atoll.coordinator.services.checkpoint_relay import CheckpointRelay
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Step
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import MAX_INTEGER, Checkpoint, Event, ForgottenNode, Node, Round, Run
from atoll.coordinator.store.store import EventFilter, MetricsPage, Store
from atoll.core.errors import InvalidRequest, NotFound
from atoll.core.membership import ROLE_NAMES
from atoll.core.tokens import hash_secret, new_join_token
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import admin_pb2_grpc, manifest_pb2
from atoll.v1 import common_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
EVENT_BATCH = 500
MAX_TAIL = 10_000
FOLLOW_SECONDS = 30.0
MAX_ROUNDS = 10_000
MAX_METRICS_ROWS = 2000  # in one answer; a row takes some 200 bytes


class AdminService(admin_pb2_grpc.AdminServicer):
    """Tokens, nodes, runs, plans, events, rounds, checkpoints: one method for each RPC of `admin.proto`."""

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

    # --- tokens ------------------------------------------------------------------------------------

    async def CreateToken(self, request: wire.CreateTokenRequest, context: Context) -> wire.CreateTokenResponse:
        """Create a token with a fresh secret; only the secret's hash is stored."""
        text = new_join_token(self._keys.ca.sha256, self._public_endpoint)
        wanted = admission.TokenRequest(
            token_id=text.token_id,
            secret_hash=hash_secret(text.secret),
            run_id=request.run_id,
            uses=request.uses,
            ttl_seconds=request.ttl_seconds,
            roles=tuple(_role_name(role) for role in request.roles),
            on_probation=request.on_probation,
        )
        token = await self._controller.do(lambda state, now: admission.create_token(state, now, wanted))
        return wire.CreateTokenResponse(token=text.text(), view=views.token_view(token))

    async def ListTokens(self, request: wire.ListTokensRequest, context: Context) -> wire.ListTokensResponse:
        """All tokens, the newest first."""
        tokens = sorted(self._controller.state.tokens.values(), key=lambda token: -token.created_ms)
        return wire.ListTokensResponse(tokens=[views.token_view(token) for token in tokens])

    async def RevokeToken(self, request: wire.RevokeTokenRequest, context: Context) -> wire.RevokeTokenResponse:
        """Revoke a token by id."""
        token = await self._controller.do(lambda state, now: admission.revoke_token(state, now, request.id))
        return wire.RevokeTokenResponse(view=views.token_view(token))

    # --- certificate authorities -------------------------------------------------------------------

    async def GetAuthorities(self, request: wire.GetAuthoritiesRequest, context: Context) -> wire.AuthoritiesView:
        """The trusted certificate authorities."""
        return self._authorities.view()

    async def RotateAuthority(self, request: wire.RotateAuthorityRequest, context: Context) -> wire.AuthoritiesView:
        """Introduce a new certificate authority."""
        return await self._authorities.rotate(request.overlap_seconds)

    async def RetireAuthority(self, request: wire.RetireAuthorityRequest, context: Context) -> wire.AuthoritiesView:
        """End trust in the old one now."""
        return await self._authorities.retire(force=request.force)

    # --- nodes -------------------------------------------------------------------------------------

    async def ListNodes(self, request: wire.ListNodesRequest, context: Context) -> wire.ListNodesResponse:
        """Nodes of one run, or of all, by run and name."""
        state = self._controller.state
        run_id = lookup.run(state, request.run_id).run_id if request.run_id else ""
        nodes = [node for node in state.present_nodes() if run_id in ("", node.run_id)]
        nodes.sort(key=lambda node: (node.run_id, node.name))
        return wire.ListNodesResponse(nodes=[self._node(node) for node in nodes])

    async def GetNode(self, request: wire.GetNodeRequest, context: Context) -> wire.NodeView:
        """A node by peer id, name, or end of a peer id; also what is left of a forgotten one, by its peer id."""
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
        """Put a node's peer id on the deny-list, for good."""
        banned = await self._controller.do(lambda state, now: bans.ban(state, now, request.node, request.reason))
        return self._known(banned)

    async def UnbanNode(self, request: wire.UnbanNodeRequest, context: Context) -> wire.NodeView:
        """Take a node's peer id off the deny-list."""
        node = await self._controller.do(lambda state, now: bans.unban(state, now, request.node))
        return self._node(node) if node is not None else wire.NodeView(peer_id=request.node)

    async def ListProofs(self, request: wire.ListProofsRequest, context: Context) -> wire.ListProofsResponse:
        """Proofs against members of one run, or of all."""
        state = self._controller.state
        run_id = lookup.run(state, request.run_id).run_id if request.run_id else ""
        rows = await self._controller.read(lambda store: store.proofs(run_id))
        return wire.ListProofsResponse(proofs=[views.proof_view(self._controller.state, row) for row in rows])

    async def GetProof(self, request: wire.GetProofRequest, context: Context) -> wire.ProofView:
        """A proof by its id, or a unique prefix of it, with its bytes."""
        rows = await self._controller.read(lambda store: store.proofs(""))
        found = [row for row in rows if request.id and row.proof_id.startswith(request.id)]
        if len(found) != 1:
            which = f"{len(found)} proofs begin with" if found else "no proof begins with"
            raise NotFound(f"{which} {request.id!r}", "see `atollctl trust list`")
        view = views.proof_view(self._controller.state, found[0])
        view.proof = found[0].proof
        return view

    # --- runs --------------------------------------------------------------------------------------

    async def CreateRun(self, request: wire.CreateRunRequest, context: Context) -> wire.RunView:
        """Create a run from a TOML spec."""
        return await self._run(
            await self._controller.do(
                lambda state, now: lifecycle.create_run(state, now, request.spec_toml, start=request.start)
            )
        )

    async def StartRun(self, request: wire.RunRequest, context: Context) -> wire.RunView:
        """Start a run, or resume a paused one."""
        policy = self._controller.policy
        return await self._run(
            await self._controller.do(lambda state, now: lifecycle.start(state, now, request.run_id, policy))
        )

    async def PauseRun(self, request: wire.RunRequest, context: Context) -> wire.RunView:
        """Pause a run: its nodes wait."""
        return await self._run(
            await self._controller.do(lambda state, now: lifecycle.pause(state, now, request.run_id))
        )

    async def StopRun(self, request: wire.RunRequest, context: Context) -> wire.RunView:
        """End a run for good."""
        return await self._run(await self._controller.do(lambda state, now: lifecycle.stop(state, now, request.run_id)))

    async def RecoverRun(self, request: wire.RecoverRunRequest, context: Context) -> wire.RunView:
        """Resume a run from the newest state that connected nodes hold."""
        return await self._run(
            await self._controller.do(
                lambda state, now: recovery.recover(state, now, request.run_id, force=request.force)
            )
        )

    async def GetRun(self, request: wire.RunRequest, context: Context) -> wire.RunView:
        """A run with its evaluations."""
        return await self._run(lookup.run(self._controller.state, request.run_id))

    async def ListRuns(self, request: wire.ListRunsRequest, context: Context) -> wire.ListRunsResponse:
        """All runs, the oldest first, without evaluations."""
        state = self._controller.state
        runs = sorted(state.runs.values(), key=lambda run: run.created_ms)
        now = self._controller.moment().unix_ms
        return wire.ListRunsResponse(runs=[views.run_view(state, run, now) for run in runs])

    # --- plans, rounds, events ---------------------------------------------------------------------

    async def GetPlan(self, request: wire.GetPlanRequest, context: Context) -> wire.PlanView:
        """A plan by version; 0: the newest."""
        state = self._controller.state
        run = lookup.run(state, request.run_id)
        version = min(request.version or run.plan_version, MAX_INTEGER)
        row = await self._controller.read(lambda store: store.plan(run.run_id, version)) if version else None
        if row is None:
            which = f"plan {request.version}" if request.version else "plan"
            missing = state.memory[run.run_id].no_plan_reason
            raise NotFound(
                f"run {run.run_id!r} has no {which} yet" + (f": {missing}" if missing else ""),
                "plan 1 is issued after genesis; see `atollctl run show`",
            )
        figures = await self._controller.read(lambda store: store.plan_figures(run.run_id))
        own = next((item for item in figures if item.version == version), None)
        state, wishes = self._present(run.run_id), self._controller.policy.preferences
        return plan_views.plan_view(state, pb.Signed.FromString(row.sealed), own, wishes)

    async def PlanHistory(self, request: wire.PlanHistoryRequest, context: Context) -> wire.PlanHistoryResponse:
        """Figures of all plans of a run, the oldest first."""
        run = lookup.run(self._controller.state, request.run_id)
        rows = await self._controller.read(lambda store: store.plan_figures(run.run_id))
        return wire.PlanHistoryResponse(plans=[plan_views.figures_view(row) for row in rows])

    async def ApplyPlan(self, request: wire.ApplyPlanRequest, context: Context) -> wire.ApplyPlanResponse:
        """Plan now; issue the plan, or with `dry_run` only return what would change."""
        run = lookup.run(self._controller.state, request.run_id)
        question = plan_apply.operator_question(
            self._controller.state, self._controller.moment(), run.run_id, self._controller.policy
        )
        found = await self._controller.plan(question)
        issued = None
        if not request.dry_run:
            issued = await self._controller.do(
                lambda state, now: plan_apply.apply(state, now, run.run_id, question, found)
            )
        return plan_views.proposal_view(self._present(run.run_id), run.run_id, question, found, issued)

    async def PinNode(self, request: wire.PinNodeRequest, context: Context) -> wire.NodeView:
        """Pin a node to layers, or out of the plan."""
        span = (request.span.first, request.span.last) if request.HasField("span") else None
        return self._node(await self._controller.do(lambda state, now: pinning.pin(state, now, request.node, span)))

    async def UnpinNode(self, request: wire.UnpinNodeRequest, context: Context) -> wire.NodeView:
        """Remove a node's pin."""
        return self._node(await self._controller.do(lambda state, now: pinning.unpin(state, now, request.node)))

    async def ListRounds(self, request: wire.ListRoundsRequest, context: Context) -> wire.ListRoundsResponse:
        """Rounds after a number, or the newest ones; the oldest first."""
        run_id = lookup.run(self._controller.state, request.run_id).run_id
        limit, after_round = min(request.limit or 1000, MAX_ROUNDS), min(request.after_round, MAX_INTEGER)

        def wanted(store: Store) -> tuple[Round, ...]:
            newest = request.newest
            return store.newest_rounds(run_id, limit) if newest else store.rounds(run_id, after_round, limit)

        rows = await self._controller.read(wanted)
        state = self._present(run_id)
        return wire.ListRoundsResponse(rounds=[views.round_view(state, row) for row in rows])

    async def ListMetrics(self, request: wire.ListMetricsRequest, context: Context) -> wire.ListMetricsResponse:
        """A page of what nodes reported of rounds."""
        state = self._controller.state
        run_id = lookup.run(state, request.run_id).run_id
        page = MetricsPage(
            limit=min(request.limit or MAX_METRICS_ROWS, MAX_METRICS_ROWS),
            since_round=min(request.since_round, MAX_INTEGER),
            after_peer_id=request.after_peer_id,
            peers=lookup.identities(state, lookup.node(state, request.node)) if request.node else (),
            newest=request.newest,
        )
        rows = await self._controller.read(lambda store: store.node_metrics(run_id, page))
        return wire.ListMetricsResponse(rows=[views.metrics_row(self._controller.state, row) for row in rows])

    async def Events(self, request: wire.EventsRequest, context: Context) -> None:  # type: ignore[override]
        """Stream wanted events after an id; with `follow`, until the caller goes or the server stops."""
        wanted = self._event_filter(request)
        after_id = min(request.after_id, MAX_INTEGER)
        tail = min(request.tail, MAX_TAIL)
        with self._controller.change_event() as changed:
            while not self._stopping.is_set():
                refuse_retired(context, self._keys.authorities)
                looked_at = self._controller.state.last_event_id  # a later look need not read these again
                rows = await self._controller.read(partial(_events, wanted, after_id, tail))
                for row in rows:
                    await context.write(views.event_view(row))
                    after_id = row.event_id
                if len(rows) == EVENT_BATCH and not tail:
                    continue
                after_id, tail = max(after_id, looked_at), 0
                if not request.follow:
                    return
                with suppress(TimeoutError):  # looks again after a while, should a wake-up be missed
                    async with asyncio.timeout(FOLLOW_SECONDS):
                        await changed.wait()
                changed.clear()

    def _event_filter(self, request: wire.EventsRequest) -> EventFilter:
        state = self._controller.state
        since_ms = self._controller.moment().unix_ms - 1000 * request.since_seconds if request.since_seconds else 0
        return EventFilter(
            run_id=lookup.run(state, request.run_id).run_id if request.run_id else "",
            subjects=lookup.identities(state, lookup.node(state, request.node)) if request.node else (),
            kind=request.kind,
            since_ms=max(0, since_ms),
        )

    # --- checkpoints -------------------------------------------------------------------------------

    async def ListCheckpoints(
        self, request: wire.ListCheckpointsRequest, context: Context
    ) -> wire.ListCheckpointsResponse:
        """Checkpoints that nodes of a run reported, the newest round first."""
        state = self._controller.state
        found = checkpoints.checkpoints_of_run(state, lookup.run(state, request.run_id).run_id)
        return wire.ListCheckpointsResponse(checkpoints=[views.checkpoint_view(state, item) for item in found])

    async def PullCheckpoint(self, request: wire.PullCheckpointRequest, context: Context) -> None:  # type: ignore[override]
        """Relay the files of one checkpoint, or of several that together hold all layers."""
        lenient, state = request.unverified, self._controller.state
        wanted = checkpoints.choose_for_pull(state, request.run_id, request.round, request.node, unverified=lenient)

        def check(item: Checkpoint, manifest: manifest_pb2.CommittedManifest) -> None:
            checkpoints.check_manifest(self._controller.state, item, manifest, unverified=lenient)

        await self._uploads.pull(wanted, check, context.write)

    # --- ends of runs and nodes, checkpoints now -----------------------------------------------------

    async def DeleteRun(self, request: wire.DeleteRunRequest, context: Context) -> wire.DeleteRunResponse:
        """Forget a run for good."""
        found = await self._controller.do(
            lambda state, now: deletion.delete(state, now, self._controller.policy, request.run_id)
        )
        run = found.run
        return wire.DeleteRunResponse(
            run_id=run.run_id, head_round=run.head_round, nodes=found.nodes, tokens=found.tokens
        )

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

    async def OrderCheckpoint(
        self, request: wire.OrderCheckpointRequest, context: Context
    ) -> wire.OrderCheckpointResponse:
        """Have connected nodes write a checkpoint, or repeat that; tell how far it is."""
        wanted = min(request.round, MAX_INTEGER)

        def order(state: State, now: StepTime) -> Step[wire.OrderCheckpointResponse]:
            step = checkpoint_orders.order(state, now, request.run_id, wanted)
            return Step(step.state, views.checkpoint_progress(step.state, step.result), step.records)

        found = await self._controller.do(order)
        self._controller.notify()  # nodes are told at once; the order has no row that would do so
        return found

    async def FindForkSource(self, request: wire.ForkSourceRequest, context: Context) -> wire.ForkSourceView:
        """A committed round of a run with which another run can begin, and the nodes that hold it."""
        state = self._controller.state
        run_id, number = lookup.run(state, request.run_id).run_id, min(request.round, MAX_INTEGER)
        rows = await self._controller.read(lambda store: store.rounds(run_id, number - 1, MAX_ROUNDS) if number else ())
        state = self._controller.state
        logged = fork_source.logged_hash(state, run_id, [row for row in rows if row.number == number])
        return views.fork_source_view(
            state, fork_source.find(state, run_id, number, request.manifest_hash, logged=logged)
        )

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


def _role_name(role: int) -> str:
    names = {int(number): name for number, name in ROLE_NAMES.items()}
    if role not in names:
        raise InvalidRequest(f"role is {role}; must be one of {', '.join(map(str, sorted(names)))}")
    return names[role]


def _events(wanted: EventFilter, after_id: int, tail: int, store: Store) -> tuple[Event, ...]:
    """The next batch of wanted events, or the newest `tail` of them."""
    if tail:
        return store.newest_events(after_id, tail, wanted)
    return store.events(after_id, EVENT_BATCH, wanted)
