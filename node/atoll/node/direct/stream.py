"""Streams on one TLS connection, one after another; each is a `transport.Stream`.

    dialler:   proof of a ticket   begin(protocol)   …   END                 begin(protocol)   …
    acceptor:                               accept   …   END                          accept   …

The dialler begins; the acceptor accepts or refuses, as on a libp2p stream. If the connection has just proved to work,
the dialler may send before the answer arrives; its first `receive` then reads the answer. `close` sends END. When both
ends have sent END and no frame is incomplete, the warm connection is free for the next stream. Anything unclean closes
the connection: an incomplete frame, a frame after END, an interrupted reader or sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core.errors import AtollError, DeadlineExceeded, FrameInvalid, Unreachable
from atoll.core.frames import MAX_FRAME_BYTES, Buffer, Frame, FrameKind, Prefix, check_frame, pack_prefix
from atoll.node.direct import tcp
from atoll.node.direct.protocol import MAX_BEGIN_BYTES, PROTOCOL
from atoll.node.direct.tls_streams import TlsStreams
from atoll.node.wire.streams import SocketStream
from atoll.node.wire.traffic import Traffic
from atoll.v1 import dataplane_pb2 as dp

RegisterConnection = Callable[[str, TlsStreams], "Connection"]  # raises if the peer is no longer a member
END_TIMEOUT = timedelta(seconds=10)  # for the peer's END after this end's: the peer's handler may be busy
_WRITE_BYTES = 256 * 1024  # encrypted at once, in the event loop
_LITTLE_BYTES = _WRITE_BYTES // 4  # asyncio's low-water mark: a waiting writer continues below it


class _TlsStream(SocketStream):
    """Frames over asyncio's TLS transport."""

    buffer_high_bytes = _WRITE_BYTES  # these are encrypted copies, so bodies may be overwritten; 0 would never resume
    checksums_bodies = False  # TLS has checked each record
    flushes_pieces = True
    max_write_bytes = _WRITE_BYTES

    def __init__(self, connection: Connection, protocol: str, max_frame_bytes: int) -> None:
        super().__init__(
            connection.peer_id,
            protocol,
            connection.reader,
            connection.writer,
            require_member=connection.require_member,
            traffic=connection.traffic,
            max_frame_bytes=max_frame_bytes,
        )
        self._sock = connection.sock

    async def _flush(self) -> None:
        if self._writer.transport.get_write_buffer_size() > _LITTLE_BYTES or self._writer.is_closing():
            await super()._flush()  # otherwise the kernel took almost all bytes, and there is no need to wait

    def _progress(self) -> tuple[int, int]:
        """Also count acknowledged segments: the buffers may stay full for long while the peer acknowledges data."""
        figures = tcp.info(self._sock)
        return figures.delivered_segments if figures else 0, super()._progress()[1]


class DirectStream(_TlsStream):
    """One stream on a direct connection."""

    def __init__(
        self,
        connection: Connection,
        protocol: str,
        max_frame_bytes: int,
        on_ended: Callable[[DirectStream], None] = lambda stream: None,
    ) -> None:
        super().__init__(connection, protocol, max_frame_bytes)
        self.was_accepted = False  # by the acceptor; set on the dialler's end only
        self._awaiting_accept = False  # this end began, and the next frame is the acceptor's answer
        self._receive_timed_out = False
        self._on_ended = on_ended  # called once, when this end has ended the stream
        self._closed = False
        self._peer_closed = False
        self._reading = False

    @property
    def has_own_connection(self) -> bool:
        return True

    @property
    def accept_timed_out(self) -> bool:
        """Return whether this end began the stream and the acceptor's answer did not arrive in time."""
        return self._receive_timed_out and self._awaiting_accept

    async def close(self) -> None:
        if self._closed:
            return
        interrupted = self._reading or self._prefix is not None or self._sending.locked()
        self._closed = True
        self._release()
        try:
            if interrupted or self._writer.is_closing():
                self._writer.transport.abort()
            else:
                async with asyncio.timeout(END_TIMEOUT.total_seconds()):
                    await self._write_end()
        except (AtollError, TimeoutError):
            self._writer.transport.abort()
        except BaseException:
            self._writer.transport.abort()
            raise
        finally:
            self._on_ended(self)

    async def receive(self, timeout: timedelta) -> Frame:
        try:
            return await super().receive(timeout)
        except DeadlineExceeded:
            self._receive_timed_out = True
            raise

    async def refuse_and_close(self, header: Buffer) -> None:
        """Send a refusal, then close; the connection may serve another stream."""
        try:
            await self.refuse(header)
        except AtollError:
            self.abort()
        await self.close()

    async def wait_peer_ended(self) -> bool:
        """After `close`, wait for the peer's END. Return True if the connection is reusable, else abort it."""
        try:
            async with asyncio.timeout(END_TIMEOUT.total_seconds()):
                if self._awaiting_accept:
                    self._check_accept(await super()._read_frame())
                if not self._peer_closed:
                    self._check_end(await self._read_prefix())
        except (AtollError, EOFError, OSError, TimeoutError):
            self._writer.transport.abort()
        return not self._writer.is_closing()

    def abort(self) -> None:
        super().abort()
        if not self._closed:
            self._closed = True
            self._on_ended(self)

    def _ended_error(self) -> Unreachable:
        self.broken |= not (self._closed or self._peer_closed)
        return super()._ended_error()

    def _is_over(self) -> bool:
        return self._closed or self._peer_closed or super()._is_over()

    def expect_accept(self) -> None:
        """On the dialler's end: let the first `receive` read the acceptor's answer."""
        self._awaiting_accept = True

    async def wait_accepted(self, timeout: timedelta) -> None:
        """On the dialler's end: wait for the acceptor's answer.

        Raises the peer's refusal, `FrameInvalid`, `Unreachable`, `DeadlineExceeded`.
        """
        self._check_accept(await self.receive(timeout))

    def _check_accept(self, frame: Frame) -> None:
        """Raise `FrameInvalid` unless the frame is an accept or a refusal; `receive` raises the refusal."""
        self._awaiting_accept = False
        if frame.kind is FrameKind.REFUSAL:
            return
        if frame.kind is not FrameKind.MESSAGE or frame.header or frame.body:
            raise FrameInvalid(f"peer {self.peer_id} answered {self.protocol} with neither an accept nor a refusal")
        self.was_accepted = True

    async def _read_frame(self) -> Frame:
        frame = await self._read_next()
        if self._awaiting_accept:
            self._check_accept(frame)
            if self.was_accepted:
                frame = await self._read_next()
        return frame

    async def _read_next(self) -> Frame:
        if self._closed or self._peer_closed:
            raise self._ended_error()
        self._reading = True
        try:
            prefix = await self._read_prefix()
            if prefix.kind is not FrameKind.END:
                return await super()._read_frame()
        finally:
            self._reading = False
        self._check_end(prefix)
        self._prefix, self._peer_closed = None, True
        raise self._ended_error()

    async def _write_end(self) -> None:
        async with self._sending:
            self._write_piece(pack_prefix(FrameKind.END, b""))
            await self._flush()

    @staticmethod
    def _check_end(prefix: Prefix) -> None:
        """Raise `FrameInvalid` unless the prefix is an empty END frame."""
        if prefix.kind is not FrameKind.END or prefix.header_bytes or prefix.body_bytes:
            raise FrameInvalid("a frame came after the end of the stream, or an END frame was not empty")
        check_frame(prefix, b"", b"")


class Connection:
    """One TLS connection with one member; carries one stream at a time."""

    def __init__(
        self,
        peer_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        require_member: Callable[[], object],
        traffic: Traffic,
    ) -> None:
        self.peer_id = peer_id
        self.reader = reader
        self.writer = writer
        self.require_member = require_member  # raises when the peer is no longer a member
        self.traffic = traffic
        self.sock: tcp.SocketOptions = writer.get_extra_info("socket")  # for TCP_INFO and for pacing
        self._control = _TlsStream(self, PROTOCOL, MAX_BEGIN_BYTES)

    @property
    def is_open(self) -> bool:
        """Return whether the connection can serve another stream, as far as this end knows."""
        return not self.writer.is_closing() and not self.reader.at_eof()

    def abort(self) -> None:
        """Close the connection at once."""
        self.writer.transport.abort()

    async def send_proof(self, presented: bytes) -> None:
        """Send the proof of a ticket, which is the dialler's first frame."""
        await self._control.send(FrameKind.MESSAGE, presented)

    async def begin(
        self, protocol: str, timeout: timedelta, on_ended: Callable[[DirectStream], None], *, optimistic: bool = False
    ) -> DirectStream:
        """Begin a stream and wait for the accept. `optimistic`: the stream's first `receive` waits for it instead.

        Raises the peer's refusal; the connection stays usable then. Raises `Unreachable` or `FrameInvalid` if the
        connection is broken.
        """
        stream = DirectStream(self, protocol, MAX_FRAME_BYTES, on_ended)
        try:
            await self._control.send(FrameKind.MESSAGE, dp.DirectBegin(protocol=protocol).SerializeToString())
            if optimistic:
                stream.expect_accept()
            else:
                await stream.wait_accepted(timeout)
        except (DeadlineExceeded, FrameInvalid, asyncio.CancelledError):
            stream.abort()
            raise
        except AtollError:
            if self.is_open:
                await stream.close()
            else:
                stream.abort()
            raise
        return stream

    async def accept_next(
        self, timeout: timedelta, protocols: Collection[str], max_frame_bytes: Callable[[str], int]
    ) -> DirectStream:
        """Wait for the next stream that the dialler begins. Raises `Unreachable`, `FrameInvalid`."""
        frame = await self._control.receive(timeout)
        try:
            begin = dp.DirectBegin.FromString(frame.header)
        except DecodeError as error:
            raise FrameInvalid("a direct stream must begin with a DirectBegin") from error
        if frame.kind is not FrameKind.MESSAGE or frame.body:
            raise FrameInvalid("a direct stream must begin with a DirectBegin")
        if begin.protocol not in protocols:  # checked here, so that no traffic counter gets a name chosen by a peer
            raise FrameInvalid("a DirectBegin names a protocol that direct connections do not serve")
        return DirectStream(self, begin.protocol, max_frame_bytes(begin.protocol))
