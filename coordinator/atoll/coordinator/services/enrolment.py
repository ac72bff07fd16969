"""`EnrolmentService`: shows what a token is for, and exchanges it for certificates.

The only service open to callers without a certificate.

A thin layer; the rules are in `runs/admission.py`.
"""

from __future__ import annotations

from typing import Any

import grpc

from atoll.coordinator.ca import CoordinatorKeys
from atoll.coordinator.controller import Controller
from atoll.coordinator.live.attendance import corpus_expected
from atoll.coordinator.runs import admission
from atoll.coordinator.services import views
from atoll.coordinator.state import lookup
from atoll.coordinator.store.records import Node
from atoll.core import protocol
from atoll.core.certs import csr_public_key
from atoll.core.errors import Busy, ClockSkew
from atoll.core.identity import peer_id_of, verify
from atoll.core.membership import ROLES, SKEW_ALLOWED, issue_membership
from atoll.core.units import duration_text
from atoll.v1 import common_pb2 as pb
from atoll.v1 import enrolment_pb2 as wire
from atoll.v1 import enrolment_pb2_grpc, plan_pb2

MAX_CONCURRENT_ENROLMENTS = 64  # complete requests in progress; incomplete ones do not count


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServicer):
    """The RPCs `Preview` and `Enrol`."""

    def __init__(self, controller: Controller, keys: CoordinatorKeys, membership_endpoint: str) -> None:
        self._controller = controller
        self._keys = keys
        self._membership_endpoint = membership_endpoint
        self._under_way = 0

    async def Preview(  # noqa: N802 - gRPC dictates the names
        self, request: wire.PreviewRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> wire.PreviewResponse:
        """Return the run's requirements, if the token would admit the applicant. Does not use the token."""
        if self._under_way >= MAX_CONCURRENT_ENROLMENTS:
            raise Busy(f"{MAX_CONCURRENT_ENROLMENTS} nodes are enrolling already", "try again in a few seconds")
        protocol.check(request.protocol, "the node")
        self._check_clock(request.node_unix_ms / 1000)
        applicant = admission.Applicant(
            token_id=request.token_id,
            secret=request.token_secret,
            peer_id=peer_id_of(request.identity_public_key),
            public_key=request.identity_public_key,
            node_name=request.node_name,
        )
        state = self._controller.state
        token = admission.check_applicant(state, self._controller.moment(), applicant)
        run = state.runs[token.run_id]
        return wire.PreviewResponse(
            run_id=run.run_id,
            run_spec_toml=run.spec_toml,
            roles=[ROLES[role] for role in token.roles],
            run_state=views.run_state(run),
            layers=plan_pb2.LayerTable.FromString(run.layers) if run.layers else None,
            corpus_digest=corpus_expected(state, run.run_id),
            head_round=run.head_round,
            operator_public_key=self._keys.operator.public_key,
        )

    async def Enrol(  # noqa: N802
        self, request: wire.EnrolRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> wire.EnrolResponse:
        """Verify the applicant's keys, spend the token, and return everything that a member needs."""
        if self._under_way >= MAX_CONCURRENT_ENROLMENTS:
            raise Busy(f"{MAX_CONCURRENT_ENROLMENTS} nodes are enrolling already", "try again in a few seconds")
        self._under_way += 1
        try:
            return await self._enrol(request)
        finally:
            self._under_way -= 1

    async def _enrol(self, request: wire.EnrolRequest) -> wire.EnrolResponse:
        protocol.check(request.protocol, "the node")
        self._check_clock(request.node_unix_ms / 1000)
        peer_id = peer_id_of(request.identity_public_key)
        verify("csr", request.csr_der, request.csr_signature, request.identity_public_key)
        csr_public_key(request.csr_der)  # raises before the token is used
        applicant = admission.Applicant(
            token_id=request.token_id,
            secret=request.token_secret,
            peer_id=peer_id,
            public_key=request.identity_public_key,
            node_name=request.node_name,
            authority=self._keys.authorities.now.issuing.sha256,
        )
        node = await self._controller.do(lambda state, now: admission.enrol(state, now, applicant))
        state = self._controller.state
        run = lookup.run(state, node.run_id)  # the run may be deleted by now
        return wire.EnrolResponse(
            certificate_chain_pem=self._keys.issue_node(request.csr_der, peer_id),
            membership=membership_of(self._controller, node),
            operator_public_key=self._keys.operator.public_key,
            deny_list=self._controller.signed.deny_list,
            seeds=admission.seeds_of(state, node.run_id),
            run_spec_toml=run.spec_toml,
            membership_endpoint=self._membership_endpoint,
            run_id=node.run_id,
            run_created_unix_ms=run.created_ms,
            authorities=self._keys.announced.signed if self._keys.announced else None,
        )

    def _check_clock(self, node_unix: float) -> None:
        skew = node_unix - self._controller.clock.unix()
        if abs(skew) > SKEW_ALLOWED.total_seconds():
            direction = "ahead of" if skew > 0 else "behind"
            raise ClockSkew(
                f"the node's clock is {duration_text(abs(skew))} {direction} the coordinator's",
                "set both clocks, for example with NTP",
            )


def membership_of(controller: Controller, node: Node) -> pb.Signed:
    """Membership certificate that peers show each other. Raises `NotFound` if the run was just deleted."""
    created_ms = lookup.run(controller.state, node.run_id).created_ms
    return issue_membership(
        controller.operator,
        public_key=node.public_key,
        run_id=node.run_id,
        roles=frozenset(node.roles),
        epoch=node.epoch,
        now=controller.clock.unix(),
        node_name=node.name,
        run_created_unix_ms=created_ms,
    )
