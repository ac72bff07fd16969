"""TLS connections as asyncio reader and writer: `dial` on one side, `accept` on the other."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from datetime import timedelta

from atoll.node.direct import tcp
from atoll.node.direct.reader import DirectReader, DirectReaderProtocol


class _LossReportingProtocol(DirectReaderProtocol):
    """Calls `on_lost` when the connection is lost, for any reason."""

    def __init__(self, reader: DirectReader) -> None:
        super().__init__(reader)
        self.on_lost: Callable[[], None] = lambda: None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_lost()


TlsStreams = tuple[DirectReader, asyncio.StreamWriter]


async def dial(address: tuple[str, int], context: ssl.SSLContext, timeout: timedelta) -> TlsStreams:
    """Connect to an IP address with TCP and TLS. Raises `OSError` (also for TLS), `TimeoutError`."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    reader, protocol = _ends()
    async with asyncio.timeout(timeout.total_seconds()):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            tcp.tune(sock)
            await loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        transport, _ = await loop.create_connection(  # closes the socket on any error
            lambda: protocol, sock=sock, ssl=context, server_hostname="", ssl_handshake_timeout=timeout.total_seconds()
        )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def accept(sock: socket.socket, context: ssl.SSLContext, timeout: timedelta) -> TlsStreams:
    """Do the TLS handshake on an accepted socket. Raises `OSError`, `TimeoutError`."""
    loop = asyncio.get_running_loop()
    reader, protocol = _ends()
    tcp.tune(sock)
    async with asyncio.timeout(timeout.total_seconds()):
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=context, ssl_handshake_timeout=timeout.total_seconds()
        )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def on_connection_lost(writer: asyncio.StreamWriter, callback: Callable[[], None]) -> None:
    """Call `callback` when the connection is lost."""
    protocol = writer.transport.get_protocol()
    assert isinstance(protocol, _LossReportingProtocol)
    protocol.on_lost = callback


def _ends() -> tuple[DirectReader, _LossReportingProtocol]:
    reader = DirectReader()
    return reader, _LossReportingProtocol(reader)
