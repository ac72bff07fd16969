"""`MembershipService`: renew, rotate, move, heartbeat, standing, vote, upload, leave.

A thin layer; the rules are in `runs/` and `rounds/`. A heartbeat stream is two tasks. One applies what the node sends,
step by step, and records the last durable request. The other responds when a request is unacknowledged or there are
updates for this node.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc

from atoll.coordinator.ca import CoordinatorKeys
from atoll.coordinator.controller import Controller
from atoll.coordinator.interceptors import NODE_SUBJECT_PREFIX, caller, issuer, refuse_retired
from atoll.coordinator.live.attendance import corpus_expected
from atoll.coordinator.rounds import coordinator_seat
from atoll.coordinator.runs import admission, assignment, departure, identity_claims, identity_rotation, machine
from atoll.coordinator.services import views
from atoll.coordinator.services.checkpoint_relay import CheckpointRelay
from atoll.coordinator.services.enrolment import membership_of
from atoll.coordinator.services.heartbeat_session import HeartbeatSession
from atoll.coordinator.state import lookup
from atoll.core.certs import csr_public_key
from atoll.core.errors import IdentityInUse
from atoll.core.identity import verify
from atoll.core.identity_rotation import verify_rotation
from atoll.core.manifest import sign_vote
from atoll.core.round_id import RoundId
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc, plan_pb2

_CHALLENGE_BYTES = 8

Context = grpc.aio.ServicerContext[Any, Any]


class MembershipService(membership_pb2_grpc.MembershipServiceServicer):
    """The RPCs `Renew`, `RotateIdentity`, `MoveToRun`, `Heartbeat`, `Standing`, `Vote`, `UploadCheckpoint`, `Leave`."""

    def __init__(
        self, controller: Controller, keys: CoordinatorKeys, uploads: CheckpointRelay, stopping: asyncio.Event
    ) -> None:
        self._controller = controller
        self._uploads = uploads
        self._keys = keys
        self._stopping = stopping
        self._patience_seconds = 2 * controller.policy.silence_seconds + 5

    async def Renew(  # noqa: N802 - gRPC dictates the names
        self, request: mb.RenewRequest, context: Context
    ) -> mb.RenewResponse:
        """Issue a new TLS certificate and the next epoch of the membership certificate."""
        peer_id = caller(context, NODE_SUBJECT_PREFIX)
        known = lookup.caller(self._controller.state, peer_id)
        verify("csr", request.csr_der, request.csr_signature, known.public_key)
        csr_public_key(request.csr_der)
        node = await self._controller.do(lambda state, now: admission.renew(state, now, peer_id))
        return mb.RenewResponse(
            certificate_chain_pem=self._keys.issue_node(request.csr_der, peer_id),
            membership=membership_of(self._controller, node),
            deny_list=self._controller.signed.deny_list,
        )

    async def RotateIdentity(  # noqa: N802
        self, request: mb.RotateIdentityRequest, context: Context
    ) -> mb.RotateIdentityResponse:
        """Move the caller's membership to its new identity, and deny the old one."""
        peer_id = caller(context, NODE_SUBJECT_PREFIX)
        rotation = verify_rotation(request.rotation, self._controller.operator.public_key)
        verify("csr", request.csr_der, request.csr_signature, rotation.new_public_key)
        csr_public_key(request.csr_der)
        node = await self._controller.do(lambda state, now: identity_rotation.rotate(state, now, peer_id, rotation))
        return mb.RotateIdentityResponse(
            certificate_chain_pem=self._keys.issue_node(request.csr_der, node.peer_id),
            membership=membership_of(self._controller, node),
            deny_list=self._controller.signed.deny_list,
        )

    async def MoveToRun(  # noqa: N802
        self, request: mb.MoveToRunRequest, context: Context
    ) -> mb.MoveToRunResponse:
        """Move the caller to the run that it is assigned to, and return the documents that it needs there."""
        peer_id = caller(context, NODE_SUBJECT_PREFIX)
        node = await self._controller.do(lambda state, now: assignment.move(state, now, peer_id, request.instance))
        state = self._controller.state
        run = lookup.run(state, node.run_id)  # the run may be deleted by now
        return mb.MoveToRunResponse(
            run_id=node.run_id,
            run_spec_toml=run.spec_toml,
            membership=membership_of(self._controller, node),
            seeds=admission.seeds_of(state, node.run_id),
            deny_list=self._controller.signed.deny_list,
            run_created_unix_ms=run.created_ms,
        )

    async def Leave(self, request: mb.LeaveRequest, context: Context) -> mb.LeaveResponse:  # noqa: N802
        """Record that the node leaves. The next plan does not contain it."""
        peer_id = caller(context, NODE_SUBJECT_PREFIX)
        await self._controller.do(
            lambda state, now: departure.leave(state, now, peer_id, request.reason, request.instance, request.why)
        )
        return mb.LeaveResponse()

    async def Standing(self, request: mb.StandingRequest, context: Context) -> mb.StandingResponse:  # noqa: N802
        """Return the coordinator's view of the caller: run state, draining, corpus, layers, newest round."""
        state = self._controller.state
        node = lookup.member(state, caller(context, NODE_SUBJECT_PREFIX))
        run = state.runs[node.run_id]
        return mb.StandingResponse(
            run_state=views.run_state(run),
            draining=node.draining,
            corpus_digest=corpus_expected(state, run.run_id),
            layers=plan_pb2.LayerTable.FromString(run.layers) if run.layers else None,
            head_round=run.head_round,
        )

    async def Vote(self, request: mb.VoteRequest, context: Context) -> mb.VoteResponse:  # noqa: N802
        """Return a promise or a vote. A vote is stored before it is signed."""
        peer_id, round_id = caller(context, NODE_SUBJECT_PREFIX), RoundId.from_proto(request.round)
        given = await self._controller.do(
            lambda state, now: coordinator_seat.answer_vote_request(state, now, peer_id, round_id, request.proposal)
        )
        response = views.vote_answer(round_id, given)
        if given.granted and request.proposal:
            payload = dp.Proposal.FromString(request.proposal).payload  # it was parsed before the vote
            vote = sign_vote(self._controller.operator, payload, round_id.ballot)
            response.vote.CopyFrom(vote)
        return response

    async def UploadCheckpoint(  # noqa: N802
        self, request_iterator: AsyncIterator[mb.CheckpointUpload], context: Context
    ) -> mb.CheckpointUploadResponse:
        """Relay a checkpoint to the operator who asked for it."""
        await self._uploads.receive_upload(caller(context, NODE_SUBJECT_PREFIX), request_iterator)
        return mb.CheckpointUploadResponse()

    async def Heartbeat(  # type: ignore[override]  # noqa: N802 - gRPC accepts a coroutine that writes
        self, request_iterator: AsyncIterator[mb.HeartbeatRequest], context: Context
    ) -> None:
        """Serve one stream until the node ends it, the node is silent too long, or the server stops."""
        peer_id = caller(context, NODE_SUBJECT_PREFIX)
        requests = aiter(request_iterator)
        async with asyncio.timeout(self._patience_seconds):
            first = await anext(requests, None)
            if first is None:
                return
            session = await self._open_session(peer_id, first.instance, issuer(context, self._keys.authorities))
        heartbeat_session = HeartbeatSession(self._controller, self._keys, self._uploads, peer_id, session)
        try:
            with self._controller.change_event() as changed:
                received = heartbeat_session.receive_requests(_all_of(first, requests), changed)
                listening = asyncio.create_task(received)
                try:
                    await self._send_responses(heartbeat_session, listening, changed, context)
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        finally:
            ending = self._controller.do(lambda state, now: machine.disconnect(state, now, peer_id, session))
            await asyncio.shield(ending)

    async def _open_session(self, peer_id: str, instance: bytes, authority: str) -> int:
        """Wait until no other process of this node has a stream.

        Raises `IdentityInUse` if another one proves that it is alive.
        """
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        with self._controller.change_event() as changed:
            while True:
                changed.clear()
                found = await self._controller.do(
                    lambda state, now: identity_claims.claim(state, now, peer_id, instance, challenge, authority)  # noqa: B023
                )
                if found.session:
                    return found.session
                if found.refused:
                    raise IdentityInUse(
                        "another process runs with the identity of this node: the data directory was copied",
                        "run only one of them; a second node needs another directory: atoll join --data-dir DIR",
                    )
                challenge = found.challenge
                self._controller.notify()  # the other stream sends the challenge
                await changed.wait()

    async def _send_responses(
        self, session: HeartbeatSession, listening: asyncio.Task[None], changed: asyncio.Event, context: Context
    ) -> None:
        while not self._stopping.is_set():
            # The tick ends silent streams within silence_seconds. This deadline guards against bugs in the tick.
            async with asyncio.timeout(self._patience_seconds):
                await changed.wait()
            changed.clear()
            refuse_retired(context, self._keys.authorities)
            if listening.done():
                listening.result()
                return
            response = session.next_response()
            if response is not None:
                await context.write(response)


async def _all_of(
    first: mb.HeartbeatRequest, others: AsyncIterator[mb.HeartbeatRequest]
) -> AsyncIterator[mb.HeartbeatRequest]:
    yield first
    async for request in others:
        yield request
