"""Listener: accepts direct connections from members: TCP, TLS, the proof of a ticket, then streams.

Each stream passes the same acceptor as streams over libp2p. An unauthenticated connection gets no answer: it has five
seconds to send a frame with a valid proof (at most 32 bytes), or it is closed. The number of unauthenticated
connections is bounded, in all and from one address. Each valid ticket raises the bound by one: a member that holds one
is about to dial, and a whole swarm may dial at the same moment.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta

from atoll.core import log
from atoll.core.errors import AtollError, FrameInvalid, PortInUse, Unreachable
from atoll.core.frames import PREFIX, FrameKind, check_frame, unpack_prefix
from atoll.node.direct.stream import Connection, DirectStream, RegisterConnection
from atoll.node.direct.tickets import PROOF_BYTES, Tickets
from atoll.node.direct.tls_streams import accept
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.wire.peer_slots import PeerSlots

STRANGER_TIMEOUT = timedelta(seconds=5)  # from the connection to a valid ticket
MAX_STRANGERS = 32  # in addition to one for each valid ticket
MAX_STRANGERS_PER_ADDRESS = 16  # also in addition to one for each valid ticket
MAX_CONNECTIONS_PER_PEER = 8
IDLE_TIMEOUT = timedelta(minutes=10)  # longer than any dialler keeps an idle connection
_ACCEPT_AGAIN = timedelta(seconds=0.5)  # after accept failed, for example for lack of file descriptors

_log = log.get("direct")


class Listener:
    """One TCP port on one or more addresses of this node."""

    def __init__(
        self,
        context: ssl.SSLContext,
        tickets: Tickets,
        register: RegisterConnection,
        serve: Callable[[DirectStream], Awaitable[None]],
        protocols: Collection[str],
        max_frame_bytes: Callable[[str], int],
    ) -> None:
        self.port = 0
        self.strangers_refused = 0  # unauthenticated connections
        self._context = context
        self._tickets = tickets
        self._register = register
        self._serve = serve
        self._protocols = protocols
        self._max_frame_bytes = max_frame_bytes
        self._sockets: list[socket.socket] = []
        self._strangers = PeerSlots[str](MAX_STRANGERS_PER_ADDRESS, MAX_STRANGERS)  # by address
        self._connections = PeerSlots[str](MAX_CONNECTIONS_PER_PEER)
        self._tasks = BackgroundTasks()

    def listen(self, hosts: Sequence[str], port: int) -> None:
        """Listen on one port of all `hosts`; 0 takes a free one. Raises `PortInUse`."""
        try:
            for host in hosts:
                sock = socket.create_server(
                    (host, self.port or port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
                )
                sock.setblocking(False)
                self._sockets.append(sock)
                self.port = sock.getsockname()[1]
        except OSError as error:
            self._close_sockets()
            self.port = 0
            raise PortInUse(f"cannot listen on {host} port {port}: {error.strerror}", "choose another port") from error
        for sock in self._sockets:
            self._tasks.begin(self._accept(sock))

    async def close(self) -> None:
        """Stop listening and close every connection."""
        await self._tasks.stop()
        self._close_sockets()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as error:
                _log.warning("cannot accept", reason=str(error))
                await asyncio.sleep(_ACCEPT_AGAIN.total_seconds())
                continue
            host = address[0]
            if self._strangers.try_take(host, extra=len(self._tickets)):
                self._tasks.begin(self._handle_stranger(sock, host))
            else:
                self.strangers_refused += 1
                sock.close()

    async def _handle_stranger(self, sock: socket.socket, host: str) -> None:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(STRANGER_TIMEOUT.total_seconds()):
                connection = await self._identify(sock)
        except (OSError, EOFError, TimeoutError, AtollError) as error:
            self.strangers_refused += 1
            _log.debug("unauthenticated connection refused", address=host, reason=str(error))
        finally:
            self._strangers.release(host)
        if connection is not None:
            await self._serve_connection(connection)

    async def _identify(self, sock: socket.socket) -> Connection:
        reader, writer = await accept(sock, self._context, STRANGER_TIMEOUT)
        try:
            prefix = unpack_prefix(bytes(await reader.readexactly(PREFIX.size)), PROOF_BYTES)
            if (prefix.kind, prefix.header_bytes, prefix.body_bytes) != (FrameKind.MESSAGE, PROOF_BYTES, 0):
                raise FrameInvalid("a direct connection must begin with the proof of a ticket")
            presented = check_frame(prefix, bytes(await reader.readexactly(PROOF_BYTES)), b"").header
            peer_id = self._tickets.redeem(presented)
            if peer_id is None:
                raise FrameInvalid("the ticket is unknown, used or expired")
            self._connections.take(peer_id, "direct connections")
            try:
                return self._register(peer_id, (reader, writer))
            except BaseException:
                self._connections.release(peer_id)
                raise
        except BaseException:
            writer.transport.abort()
            raise

    async def _serve_connection(self, connection: Connection) -> None:
        """Serve one stream after another, until one does not end cleanly."""
        try:
            while connection.is_open:
                stream = await connection.accept_next(IDLE_TIMEOUT, self._protocols, self._max_frame_bytes)
                await self._serve(stream)
                if not await stream.wait_peer_ended():
                    break
        except Unreachable:
            pass  # the peer closed the connection, or it was idle too long
        except AtollError as error:
            _log.info("direct connection closed", peer=connection.peer_id, reason=str(error))
        finally:
            connection.abort()
            self._connections.release(connection.peer_id)

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.close()
        self._sockets.clear()
