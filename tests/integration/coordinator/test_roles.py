"""Who may call what: the certificate decides, and so does the port."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from integration.coordinator.lab import _OPTIONS, SECONDS, Coordinator, admin_channel, coordinator, error_of

from atoll.core.certs import CertificateAuthority
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import admin_pb2_grpc, membership_pb2_grpc
from atoll.v1 import membership_pb2 as mb


async def test_a_node_cannot_call_admin_nor_an_admin_act_as_a_node(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        node = await home.node("ann")
        async with node.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin_pb2_grpc.AdminStub(channel).ListNodes(admin.ListNodesRequest(), timeout=SECONDS)  # type: ignore[misc]
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert error_of(refused.value).reason == "NotPermitted"
        async with admin_channel(home.data_dir / "admin", home.endpoints.local) as channel:
            stub = membership_pb2_grpc.MembershipServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Leave(mb.LeaveRequest(), timeout=SECONDS)  # type: ignore[misc]
            assert error_of(refused.value).reason == "NotPermitted"
            call = stub.Heartbeat()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert error_of(refused.value).reason == "NotPermitted"


async def _leave_with(home: Coordinator, credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
    async with grpc.aio.secure_channel(home.endpoints.local, credentials, _OPTIONS) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await membership_pb2_grpc.MembershipServiceStub(channel).Leave(mb.LeaveRequest(), timeout=SECONDS)  # type: ignore[misc]
    return refused.value.code()


async def test_strangers_do_not_get_through_the_handshake(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        ca = home.keys.ca.pem
        assert await _leave_with(home, grpc.ssl_channel_credentials(ca)) is grpc.StatusCode.UNAVAILABLE
        forger = CertificateAuthority.load_or_create(tmp_path / "k", tmp_path / "c.crt", home.controller.clock.unix())
        forged = forger.issue_with_new_key("atoll://admin/operator", home.controller.clock.unix())
        credentials = grpc.ssl_channel_credentials(ca, forged.key_pem, forged.chain_pem)
        assert await _leave_with(home, credentials) is grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        then = home.controller.clock.unix() - 2 * 3600
        old = home.keys.ca.issue_with_new_key("atoll://node/ann", then, lifetime=timedelta(hours=1))
        credentials = grpc.ssl_channel_credentials(home.keys.ca.pem, old.key_pem, old.chain_pem)
        assert await _leave_with(home, credentials) is grpc.StatusCode.UNAVAILABLE


async def test_members_get_health_checks_and_strangers_nothing_to_hold_open(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        serving = health_pb2.HealthCheckResponse.SERVING
        trusted = grpc.ssl_channel_credentials(home.keys.ca.pem)
        async with grpc.aio.secure_channel(home.endpoints.enrolment, trusted, _OPTIONS) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await watch.read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with admin_channel(home.data_dir / "admin", home.endpoints.local) as channel:
            request = health_pb2.HealthCheckRequest(service="atoll.v1.Admin")
            assert (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS)).status == serving


async def test_admin_is_not_served_on_the_strangers_port(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        async with admin_channel(home.data_dir / "admin", home.endpoints.enrolment) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin_pb2_grpc.AdminStub(channel).ListNodes(admin.ListNodesRequest(), timeout=SECONDS)  # type: ignore[misc]
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_many_handshakes_at_once_do_no_harm(tmp_path: Path) -> None:
    """A server that hands gRPC its configuration at every handshake dies of this within a second."""
    async with coordinator(tmp_path / "c") as home:

        async def ask() -> None:
            async with admin_channel(home.data_dir / "admin", home.endpoints.local) as channel:
                await admin_pb2_grpc.AdminStub(channel).ListRuns(admin.ListRunsRequest(), timeout=SECONDS)  # type: ignore[misc]

        for _ in range(6):
            await asyncio.gather(*(ask() for _ in range(40)))
