"""A conversation over one socket: frames with a cap, a checksum and deadlines.

Here the socket is p2pd's unix socket, one per stream, or several that carry one conversation (`stripes.py`);
`direct/stream.py` has several conversations, one after another, on a TLS connection. A frame costs one read for its
prefix and one for the rest; nothing is allocated before the announced length passed the cap. When `receive` gives up at
its deadline, what arrived so far is kept and the next `receive` goes on there. When `send` returns, the kernel, or TLS,
has all of it: the body may be overwritten. A sender waits for a slow peer as long as bytes move and gives up when none
moved for half a minute. The owner's limits on traffic hold here: large frames go out in pieces, and come in one at a
time, as `traffic.py` allows, and none with a body once the month is spent (`Busy`). A send that is given up in the
middle of a frame ends the stream.

Streams are never half-closed: p2pd loses the reply then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol, cast

from atoll.core.errors import AtollError, DeadlineExceeded, FrameInvalid, Unreachable
from atoll.core.frames import (
    MAX_FRAME_BYTES,
    PREFIX,
    Buffer,
    Frame,
    FrameKind,
    Prefix,
    check_frame,
    pack_prefix,
    unpack_prefix,
)
from atoll.node.wire.refusals import REFUSAL_LINGER, raise_if_refusal
from atoll.node.wire.traffic import SMALL_FRAME_BYTES, Traffic

STALL_TIMEOUT = timedelta(seconds=30)  # without a byte of progress
CLOSE_TIMEOUT = timedelta(seconds=5)
_DISCARD_BYTES = 1024
_JOIN_BELOW_BYTES = 64 * 1024  # smaller bodies go out with their prefix in one write


class ByteReader(Protocol):
    """What a stream needs of asyncio's reader."""

    async def readexactly(self, n: int, /) -> Buffer: ...


class ByteTransport(Protocol):
    """What a stream needs of the transport that a writer has."""

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int: ...

    def abort(self) -> None: ...


class ByteWriter(Protocol):
    """What a stream needs of asyncio's writer."""

    @property
    def transport(self) -> ByteTransport: ...

    def write(self, data: Buffer, /) -> None: ...

    async def drain(self) -> None: ...

    def is_closing(self) -> bool: ...

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


class SocketStream:
    """One end of a stream; implements `transport.Stream`."""

    buffer_high_bytes = 0  # `drain` waits until the kernel has everything
    checksums_bodies = True  # whether checksums are of bodies, too
    flushes_pieces = False  # whether each piece of a frame must be gone before the next, also without a limit

    def __init__(
        self,
        peer_id: str,
        protocol: str,
        reader: ByteReader,
        writer: ByteWriter,
        *,
        require_member: Callable[[], object],
        traffic: Traffic,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.protocol = protocol
        self._peer_id = peer_id
        self._reader = reader
        self._writer = writer
        self._require_member = require_member  # raises when the peer is no member any more
        self._traffic = traffic
        self._max_frame_bytes = max_frame_bytes
        self._prefix: Prefix | None = None  # of a frame whose rest has not arrived
        self._body_start = 0.0  # when the rest may be read
        self._reserved_download_bytes = 0  # bytes of the rest that the line down keeps a slot for
        self.broken = False  # by the other side, or by what lies between
        self._sending = asyncio.Lock()
        self._sent = 0
        self._received = 0
        self._on_close: list[Callable[[], None]] = []
        writer.transport.set_write_buffer_limits(high=self.buffer_high_bytes)

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def bytes_sent(self) -> int:
        return self._sent

    @property
    def bytes_received(self) -> int:
        return self._received

    @property
    def has_own_connection(self) -> bool:
        return False

    async def send(self, kind: FrameKind, header: Buffer, body: Buffer = b"") -> None:
        self._require_member()
        await self._write(kind, header, body)

    async def refuse(self, header: Buffer) -> None:
        """Send a refusal; the one frame that a stranger may get."""
        await self._write(FrameKind.REFUSAL, header, b"")

    async def refuse_and_close(self, header: Buffer) -> None:
        """Refuse without reading, and end."""
        cast(asyncio.Transport, self._writer.transport).pause_reading()
        with suppress(AtollError):
            await self.refuse(header)
        await self.close()

    async def refuse_after_reading(self, header: Buffer) -> None:
        """Refuse a peer that has already sent data: p2pd loses our answer if we close with bytes unread.

        For a moment, so many are thrown away.
        """
        with suppress(AtollError, EOFError, OSError, TimeoutError):
            async with asyncio.timeout(REFUSAL_LINGER.total_seconds()):
                await self.refuse(header)
                await self._reader.readexactly(_DISCARD_BYTES)
        await self.close()

    async def receive(self, timeout: timedelta) -> Frame:
        self._require_member()
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                frame = await self._read_frame()
        except TimeoutError as error:
            raise DeadlineExceeded(f"peer {self._peer_id} sent no whole frame within {timeout}") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise self._ended_error() from error
        return await raise_if_refusal(self, frame)

    async def close(self) -> None:
        self._release()
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT.total_seconds()):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    def abort(self) -> None:
        """Close without waiting for anything."""
        self._release()
        self._writer.transport.abort()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when this end closes the stream."""
        self._on_close.append(callback)

    async def _write(self, kind: FrameKind, header: Buffer, body: Buffer) -> None:
        self._traffic.check_allowance(len(body))
        start = pack_prefix(kind, header, body, checksum_body=self.checksums_bodies)
        if self._is_over():
            raise self._ended_error()
        frame: list[Buffer] = (
            [b"".join((start, header, body))] if len(body) < _JOIN_BELOW_BYTES else [start + header, body]
        )
        size = left = PREFIX.size + len(header) + len(body)
        up = self._traffic.up
        async with self._sending:
            try:
                for piece in self._pieces(frame):
                    await up.wait(len(piece), small=size <= SMALL_FRAME_BYTES)
                    if self._is_over():
                        raise self._ended_error()
                    self._write_piece(piece)
                    left -= len(piece)
                    if up.limited or self.flushes_pieces:
                        await self._flush()
                await self._flush()
            except BaseException:
                if 0 < left < size:
                    self.abort()
                raise

    def _pieces(self, frame: list[Buffer]) -> Iterable[Buffer]:
        """What goes out in one write each, while the owner's limit lets it."""
        return self._traffic.up.pieces(frame)

    def _is_over(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._writer.is_closing()

    async def _read_prefix(self) -> Prefix:
        if self._prefix is None:
            start = await self._reader.readexactly(PREFIX.size)
            self._got(len(start))
            self._prefix = unpack_prefix(start, self._max_frame_bytes)
            size = PREFIX.size + self._prefix.header_bytes + self._prefix.body_bytes
            self._body_start = self._traffic.down.slot_start(size, small=size <= SMALL_FRAME_BYTES)
            self._reserved_download_bytes = size - PREFIX.size
        return self._prefix

    async def _read_frame(self) -> Frame:
        prefix = await self._read_prefix()
        if prefix.kind is FrameKind.END:
            raise FrameInvalid("this stream ends when its socket is closed, not by a frame")
        self._traffic.check_allowance(prefix.body_bytes)
        await self._traffic.down.sleep_until(self._body_start)
        rest = memoryview(await self._reader.readexactly(prefix.header_bytes + prefix.body_bytes))
        self._prefix, self._reserved_download_bytes = None, 0
        self._got(len(rest))
        header, body = bytes(rest[: prefix.header_bytes]), rest[prefix.header_bytes :]
        return check_frame(prefix, header, body, checksum_body=self.checksums_bodies)

    def _write_piece(self, piece: Buffer) -> None:
        self._writer.write(piece)
        self._sent += len(piece)
        self._traffic.count_sent(self.protocol, len(piece))

    def _got(self, count: int) -> None:
        self._received += count
        self._traffic.received[self.protocol] += count

    async def _flush(self) -> None:
        before = self._progress()
        while True:
            try:
                async with asyncio.timeout(STALL_TIMEOUT.total_seconds()):
                    return await self._writer.drain()
            except TimeoutError as error:
                now = self._progress()
                if now <= before:
                    self.broken = True
                    self.abort()
                    raise Unreachable(f"peer {self._peer_id} took nothing for {STALL_TIMEOUT}") from error
                before = now
            except OSError as error:
                raise self._ended_error() from error

    def _progress(self) -> tuple[int, int]:
        """Grows as long as the other side takes what was written."""
        return 0, -self._writer.transport.get_write_buffer_size()

    def _release(self) -> None:
        self._traffic.down.cancel_slot(self._reserved_download_bytes)  # who announces much and leaves holds nobody up
        self._reserved_download_bytes = 0
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()

    def _ended_error(self) -> Unreachable:
        return Unreachable(f"peer {self._peer_id} ended the stream {self.protocol}")
