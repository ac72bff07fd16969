"""P2pdControl: the client of p2pd's control socket, which is hivemind's client with bounded waits.

One persistent connection carries unary calls; every other request uses its own short connection. In contrast to
hivemind's client, short connections have a deadline and are always closed, their failures become `AtollError`s, a late
reply to a cancelled call does not stop the reader of the persistent connection, unary calls fail when that connection
ends, and raw streams get a larger buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2 as p2pd
from hivemind.utils.multiaddr import Multiaddr

from atoll.core.errors import DeadlineExceeded, Unreachable

STREAM_BUFFER_BYTES = 64 * 1024  # asyncio reads ahead up to twice this; more did not raise the rate
CONTROL_TIMEOUT = timedelta(seconds=5)  # for requests that p2pd answers without the network
_ENDED = "p2pd has ended its connection"


class _Reply(asyncio.Future[bytes]):
    """A future that ignores a result that arrives after it was cancelled."""

    def set_result(self, result: bytes) -> None:
        if not self.done():
            super().set_result(result)

    def set_exception(self, exception: type | BaseException) -> None:
        if not self.done():
            super().set_exception(exception)


class P2pdControl(ControlClient):  # type: ignore[misc]
    """The client of one p2pd's control socket."""

    @classmethod
    async def attach(cls, control_socket: Path, stream_socket: Path) -> Client:
        """Connect hivemind's client to the daemon behind `control_socket`. Raises `Unreachable`."""
        client = Client(_initialized_with_create=True)
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT.total_seconds()):
                client.control = await cls.create(
                    DaemonConnector(Multiaddr(f"/unix{control_socket}")), Multiaddr(f"/unix{stream_socket}")
                )
        except (OSError, TimeoutError, EOFError) as error:
            raise Unreachable(f"p2pd does not answer on {control_socket}: {error}") from error
        client.control.on_lost(client.control._fail_pending_calls)  # hivemind's client would wait for answers for ever
        return client

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the persistent connection ends, for any reason."""
        self._read_task.add_done_callback(lambda _: callback())

    async def request(self, request: p2pd.Request, timeout: timedelta = CONTROL_TIMEOUT) -> p2pd.Response:
        """Send one request on a short connection and return the response. Raises `Unreachable`, `DeadlineExceeded`."""
        response, _, writer = await self._exchange(request, timeout)
        writer.close()
        return response

    async def open_stream(
        self, peer_id: PeerID, protocol: str, timeout: timedelta
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw stream to `peer_id`. Raises `Unreachable`, `DeadlineExceeded`."""
        opening = p2pd.StreamOpenRequest(peer=peer_id.to_bytes(), proto=[protocol])
        request = p2pd.Request(type=p2pd.Request.STREAM_OPEN, streamOpen=opening)
        _, reader, writer = await self._exchange(request, timeout)
        return reader, writer

    async def _exchange(
        self, request: p2pd.Request, timeout: timedelta
    ) -> tuple[p2pd.Response, asyncio.StreamReader, asyncio.StreamWriter]:
        writer: asyncio.StreamWriter | None = None
        response = p2pd.Response()
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                path = self.daemon_connector.control_maddr.value_for_protocol("unix")
                reader, writer = await asyncio.open_unix_connection(path, limit=STREAM_BUFFER_BYTES)
                await write_pbmsg(writer, request)
                await read_pbmsg_safe(reader, response)
            if response.type == p2pd.Response.ERROR:
                raise Unreachable(response.error.msg)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"p2pd did not answer within {timeout}") from error
            if isinstance(error, OSError | EOFError):
                raise Unreachable(f"p2pd does not answer: {error}") from error
            raise
        return response, reader, writer

    async def identify(self) -> tuple[PeerID, tuple[Multiaddr, ...]]:
        response = await self.request(p2pd.Request(type=p2pd.Request.IDENTIFY))
        return PeerID(response.identify.id), tuple(Multiaddr(raw) for raw in response.identify.addrs)

    async def connect(self, peer_id: PeerID, maddrs: Iterable[Multiaddr], timeout: timedelta = CONTROL_TIMEOUT) -> None:
        addresses = [maddr.to_bytes() for maddr in maddrs]
        connect = p2pd.ConnectRequest(peer=peer_id.to_bytes(), addrs=addresses)
        await self.request(p2pd.Request(type=p2pd.Request.CONNECT, connect=connect), timeout)

    async def serve_streams(self, protocol: str) -> None:
        """Ask p2pd to deliver streams of `protocol` to this node's stream socket."""
        handler = p2pd.StreamHandlerRequest(addr=self.listen_maddr.to_bytes(), proto=[protocol], balanced=False)
        await self.request(p2pd.Request(type=p2pd.Request.STREAM_HANDLER, streamHandler=handler))

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        """Call a peer as hivemind does; a reply that arrives too late does not end the shared reader."""
        call_id = uuid4()
        call = p2pd.CallUnaryRequest(peer=peer_id.to_bytes(), proto=proto, data=data)
        message = p2pd.PersistentConnectionRequest(callId=call_id.bytes, callUnary=call)
        if message.ByteSize() > self.persistent_conn_max_msg_size:
            raise P2PDaemonError(
                f"a message has {message.ByteSize()} bytes; the cap is {self.persistent_conn_max_msg_size}"
            )
        if self._read_task.done():
            raise P2PDaemonError(_ENDED)
        reply = self._pending_calls[call_id] = _Reply()
        try:
            await self._pending_messages.put(message)
            return await reply
        except asyncio.CancelledError:
            cancel = p2pd.PersistentConnectionRequest(callId=call_id.bytes, cancel=p2pd.Cancel())
            with suppress(asyncio.QueueFull):
                self._pending_messages.put_nowait(cancel)
            raise
        finally:
            self._pending_calls.pop(call_id, None)

    def _fail_pending_calls(self) -> None:
        for reply in self._pending_calls.values():  # hivemind keeps those of registered handlers, which are done
            if not reply.done():
                reply.set_exception(P2PDaemonError(_ENDED))

    async def drain_tasks(self) -> None:
        """After `close()`, wait until both tasks of the persistent connection have ended."""
        tasks = [task for task in (self._read_task, self._write_task) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
