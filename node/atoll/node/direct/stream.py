"""Conversations on one TLS connection, one after another, each a `transport.Stream` like any other.

    dialler:   proof of a ticket   begin(protocol)   …   END                 begin(protocol)   …
    acceptor:                              come in   …   END                         come in   …

The dialler begins; the acceptor lets it in or refuses, as on a libp2p stream. On a connection that was proved to work
a moment ago the dialler need not wait for the answer before it sends; it gets it when it first receives. `close` says
END, and when both have said it with nothing else under way, the connection is free for the next conversation, warm.
Whatever is not clean, a frame that was left half-way or came after the end, a reader or sender that was interrupted,
costs the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core.errors import AtollError, DeadlineExceeded, FrameInvalid, Unreachable
from atoll.core.frames import MAX_FRAME_BYTES, Buffer, Frame, FrameKind, Prefix, check_frame, pack_prefix
from atoll.node.direct import tcp
from atoll.node.direct.protocol import MAX_BEGIN_BYTES, PROTOCOL
from atoll.node.wire.streams import SocketStream
from atoll.node.wire.traffic import Traffic
from atoll.v1 import dataplane_pb2 as wire

END_TIMEOUT = timedelta(seconds=10)  # for the other side to end, too, when we have: its handler may be busy
_WRITE_BYTES = 256 * 1024  # encrypted at once, in the event loop
_LITTLE_BYTES = _WRITE_BYTES // 4  # at which asyncio lets a writer that had to wait go on


class _TlsStream(SocketStream):
    """Frames over asyncio's TLS."""

    buffer_high_bytes = _WRITE_BYTES  # encrypted already, so bodies may be overwritten; at 0 TLS would never resume
    checksums_bodies = False  # TLS has checked each record
    flushes_pieces = True

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
            await super()._flush()  # else the kernel took all or nearly all: there is nothing to wait for

    def _progress(self) -> tuple[int, int]:
        """What TLS and the kernel hold may not shrink for long, though the other side acknowledges all the time."""
        figures = tcp.info(self._sock)
        return figures.delivered_segments if figures else 0, super()._progress()[1]


class DirectStream(_TlsStream):
    """One conversation."""

    def __init__(
        self,
        connection: Connection,
        protocol: str,
        max_frame_bytes: int,
        on_ended: Callable[[DirectStream], None] = lambda stream: None,
    ) -> None:
        super().__init__(connection, protocol, max_frame_bytes)
        self.was_accepted = False  # as a dialler
        self._awaiting_accept = False  # it began, and the acceptor's word is the next that comes
        self._receive_timed_out = False  # in vain, for whatever came next
        self._on_ended = on_ended  # called once, when this side has ended it
        self._closed = False
        self._peer_closed = False
        self._reading = False

    @property
    def has_own_connection(self) -> bool:
        return True

    @property
    def accept_timed_out(self) -> bool:
        """Whether this side began, and waited for a word until its time was up."""
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
        """Refuse, and end; the connection may serve another conversation."""
        try:
            await self.refuse(header)
        except AtollError:
            self.abort()
        await self.close()

    async def wait_peer_ended(self) -> bool:
        """After `close`: wait for the other side's END. Whether the connection is clean; else it is closed."""
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

    def _pieces(self, frame: list[Buffer]) -> Iterable[Buffer]:
        for piece in super()._pieces(frame):
            if len(piece) <= _WRITE_BYTES:
                yield piece
            else:
                view = memoryview(piece)
                yield from (view[start : start + _WRITE_BYTES] for start in range(0, len(view), _WRITE_BYTES))

    def expect_accept(self) -> None:
        """As the side that began: `receive` finds whether we are let in before anything else."""
        self._awaiting_accept = True

    async def wait_accepted(self, timeout: timedelta) -> None:
        """As the side that began, wait for that.

        Raises what the peer refuses with, `FrameInvalid`, `Unreachable`, `DeadlineExceeded`.
        """
        self._check_accept(await self.receive(timeout))

    def _check_accept(self, frame: Frame) -> None:
        """Raises `FrameInvalid` unless it lets us in; a refusal is for who receives."""
        self._awaiting_accept = False
        if frame.kind is FrameKind.REFUSAL:
            return
        if frame.kind is not FrameKind.MESSAGE or frame.header or frame.body:
            raise FrameInvalid(f"peer {self.peer_id} began {self.protocol} with something else than to let us in")
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
        """Raises `FrameInvalid` unless it is a clean END."""
        if prefix.kind is not FrameKind.END or prefix.header_bytes or prefix.body_bytes:
            raise FrameInvalid("a frame came after the conversation had ended, or an END that carries something")
        check_frame(prefix, b"", b"")


class Connection:
    """One TLS connection with one member."""

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
        self.require_member = require_member  # raises when the peer is no member any more
        self.traffic = traffic
        self.sock: tcp.SocketOptions = writer.get_extra_info("socket")  # for the kernel's figures and for pacing
        self._control = _TlsStream(self, PROTOCOL, MAX_BEGIN_BYTES)

    @property
    def is_open(self) -> bool:
        """Whether it can serve another conversation, as far as we heard."""
        return not self.writer.is_closing() and not self.reader.at_eof()

    def abort(self) -> None:
        """Close it now."""
        self.writer.transport.abort()

    async def send_proof(self, presented: bytes) -> None:
        """The first thing to send as a dialler: the proof of a ticket."""
        await self._control.send(FrameKind.MESSAGE, presented)

    async def begin(
        self, protocol: str, timeout: timedelta, on_ended: Callable[[DirectStream], None], *, optimistic: bool = False
    ) -> DirectStream:
        """Open a conversation and wait to be let in; `optimistic`: let `receive` find out whether we are.

        Raises what the peer refuses with; then the connection is as good as before. Raises `Unreachable` or
        `FrameInvalid` when it is not.
        """
        stream = DirectStream(self, protocol, MAX_FRAME_BYTES, on_ended)
        try:
            await self._control.send(FrameKind.MESSAGE, wire.DirectBegin(protocol=protocol).SerializeToString())
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
        """The conversation that the dialler begins. Raises `Unreachable`, `FrameInvalid`."""
        frame = await self._control.receive(timeout)
        try:
            begin = wire.DirectBegin.FromString(frame.header)
        except DecodeError as error:
            raise FrameInvalid("a conversation must begin with a DirectBegin") from error
        if frame.kind is not FrameKind.MESSAGE or frame.body:
            raise FrameInvalid("a conversation must begin with a DirectBegin")
        if begin.protocol not in protocols:  # nor is it counted under a name of the peer's choice
            raise FrameInvalid("a conversation must be in a protocol that direct connections are for")
        return DirectStream(self, begin.protocol, max_frame_bytes(begin.protocol))
