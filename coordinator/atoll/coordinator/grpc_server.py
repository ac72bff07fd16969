"""One gRPC port with its services: bound, guarded, and for members with the health service.

A connection takes a file descriptor and, before it has proved anything, up to 66 kB that the allocator keeps. So the
number of connections is limited, and each must finish its TLS handshake within seconds. The enrolment port has no
health service: the health service's `Watch` stays open as long as the caller likes. All other connections of callers
without a certificate end within seconds, because their one call is short.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from atoll.coordinator import addresses
from atoll.coordinator.interceptors import AuthInterceptor
from atoll.core.errors import PortInUse

HANDSHAKE_SECONDS = 5.0
_UNAUTHENTICATED_OPTIONS = (
    ("grpc.max_concurrent_streams", 8),  # of one connection
    ("grpc.max_connection_idle_ms", 5_000),
    ("grpc.max_connection_age_ms", 5_000),  # ends unfinished calls with their connection
    ("grpc.max_connection_age_grace_ms", 5_000),
)
_MEMBER_OPTIONS = (
    ("grpc.max_concurrent_streams", 64),  # of one connection; a node has a handful
    ("grpc.max_connection_idle_ms", 60_000),  # without a call; a node's heartbeat stream is one
)
_OPTIONS = (
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.so_reuseport", 0),  # otherwise two coordinators could share a port unnoticed
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),  # nodes behind NAT send pings to keep streams alive
    ("grpc.keepalive_permit_without_calls", 1),
)


class GrpcServer:
    """Bound on construction; add services to `server`, then call `start`."""

    def __init__(
        self,
        host: str,
        port: int,
        flag: str,
        credentials: grpc.ServerCredentials,
        guard: AuthInterceptor,
        *,
        max_message_bytes: int,
        max_connections: int,
        max_calls: int | None = None,  # set on the enrolment port
    ) -> None:
        """Bind the port. Raises `PortInUse`, `ConfigError`."""
        addresses.check_free(host, port, flag)
        bounds = _MEMBER_OPTIONS if max_calls is None else _UNAUTHENTICATED_OPTIONS
        limits = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_allowed_incoming_connections", max_connections),
        )
        options = (*_OPTIONS, *bounds, *limits)
        self.server = grpc.aio.server(interceptors=(guard,), options=options, maximum_concurrent_rpcs=max_calls)
        self._health = HealthServicer()
        if max_calls is None:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        try:
            self.port = self.server.add_secure_port(addresses.address(host, port), credentials)
        except RuntimeError as error:
            raise PortInUse(f"port {port} on {host} was taken just now", f"choose another one with {flag}") from error

    async def start(self, *services: str) -> None:
        """Start serving; report the server and each of `services` as healthy."""
        await self.server.start()
        for name in ("", *services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_seconds: float) -> None:
        """Accept no new calls; running calls may take `grace_seconds`."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_seconds)


async def handshake(host: str, port: int) -> None:
    """Make one TLS handshake with this coordinator's port, which makes gRPC load a changed certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            _, writer = await asyncio.open_connection(addresses.dialable(host), port, ssl=context)
            writer.close()


async def stop_all(servers: list[GrpcServer], grace_seconds: float) -> None:
    """Stop all servers at the same time, so that their grace periods do not add up."""
    await asyncio.gather(*(server.stop(grace_seconds) for server in servers))
