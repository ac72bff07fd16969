"""One TLS port with its services: bound, guarded, and for members with the health service beside them.

A connection must finish its handshake within seconds: each takes a file descriptor, and their number is limited.
Strangers get no health service, because its `Watch` stays open for as long as the caller likes, and all else that they
hold open ends within seconds: their one call is short.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from atoll.coordinator import addresses
from atoll.coordinator.interceptors import AuthInterceptor
from atoll.core.errors import PortInUse

_UNAUTHENTICATED_OPTIONS = (
    ("grpc.max_concurrent_streams", 8),  # of one connection
    ("grpc.max_connection_idle_ms", 5_000),
    ("grpc.max_connection_age_ms", 5_000),  # a call that was begun and never finished ends with its connection
    ("grpc.max_connection_age_grace_ms", 5_000),
)
_OPTIONS = (
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # or two coordinators would share a port without a word
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),  # nodes behind NAT keep their streams alive
    ("grpc.keepalive_permit_without_calls", 1),
)


class GrpcServer:
    """Bound when made; `server` takes the services; `start` answers."""

    def __init__(
        self,
        host: str,
        port: int,
        flag: str,
        credentials: grpc.ServerCredentials,
        guard: AuthInterceptor,
        *,
        max_message_bytes: int,
        max_calls: int | None = None,  # set on the strangers' port
    ) -> None:
        """Raises `PortInUse`, `ConfigError`."""
        addresses.check_free(host, port, flag)
        bounds = () if max_calls is None else _UNAUTHENTICATED_OPTIONS
        options = (*_OPTIONS, *bounds, ("grpc.max_receive_message_length", max_message_bytes))
        self.server = grpc.aio.server(interceptors=(guard,), options=options, maximum_concurrent_rpcs=max_calls)
        self._health = HealthServicer()
        if max_calls is None:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        try:
            self.port = self.server.add_secure_port(addresses.address(host, port), credentials)
        except RuntimeError as error:
            raise PortInUse(f"port {port} on {host} was taken just now", f"choose another one with {flag}") from error

    async def start(self, *services: str) -> None:
        """Answer, and say so in the health service (where there is one) for the server and each of `services`."""
        await self.server.start()
        for name in ("", *services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_seconds: float) -> None:
        """Take no more calls; let those in progress end within the grace."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_seconds)


async def stop_all(servers: list[GrpcServer], grace_seconds: float) -> None:
    """Together, so that the graces do not add up."""
    await asyncio.gather(*(server.stop(grace_seconds) for server in servers))
