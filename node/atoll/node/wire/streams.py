"""SocketStream: frames over one socket, with a size cap, a checksum and deadlines.

The socket is one unix socket of p2pd, or several that carry one stream together (`swarm/stripes.py`).
`direct/stream.py` carries several streams, one after another, on one TLS connection.

Reading: a frame costs one read for its prefix and one for the rest. Nothing is allocated before the announced length
has passed the cap. When `receive` times out, the bytes so far are kept and the next `receive` continues.
Writing: when `send` returns, the kernel or TLS has the whole frame, so the caller may overwrite the body. A sender
waits for a slow peer while bytes move and gives up after 30 s without progress. A send that is cancelled in the middle
of a frame ends the stream.
Limits: the owner's traffic limits apply here. Large frames leave in pieces and arrive one at a time, as `traffic.py`
allows. Once the monthly allowance is spent, frames with a body fail with `Busy`.

Streams are never half-closed: p2pd would lose the reply.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
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

STALL_TIMEOUT = timedelta(seconds=30)  # a sender gives up after this time without a byte of progress
CLOSE_TIMEOUT = timedelta(seconds=5)
_DISCARD_BYTES = 1024
_JOIN_BELOW_BYTES = 64 * 1024  # smaller bodies leave with their prefix in one write


class ByteReader(Protocol):
    """The part of asyncio's reader that a stream uses."""

    async def readexactly(self, n: int, /) -> Buffer: ...


class ByteTransport(Protocol):
    """The part of asyncio's transport that a stream uses."""

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int: ...

    def abort(self) -> None: ...


class ByteWriter(Protocol):
    """The part of asyncio's writer that a stream uses."""

    @property
    def transport(self) -> ByteTransport: ...

    def write(self, data: Buffer, /) -> None: ...

    async def drain(self) -> None: ...

    def is_closing(self) -> bool: ...

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


class SocketStream:
    """One end of a stream; implements `transport.Stream`.

    It has more than 20 methods: the interface, what its kinds override, and the short steps of both directions.
    """

    buffer_high_bytes = 0  # `drain` waits until the kernel has everything
    checksums_bodies = True  # checksums cover bodies, not only headers
    flushes_pieces = False  # flush after each piece of a frame, even without an upload limit
    max_write_bytes = sys.maxsize  # largest piece of a frame

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
        self._require_member = require_member  # raises when the peer is no longer a member
        self._traffic = traffic
        self._max_frame_bytes = max_frame_bytes
        self._prefix: Prefix | None = None  # of a frame whose rest has not arrived
        self._body_start = 0.0  # monotonic time from which the rest may be read
        self._reserved_download_bytes = 0  # unread bytes for which the download limiter has reserved a slot
        self.broken = False  # the peer or the path failed
        self._sending = asyncio.Lock()
        self._sent = 0
        self._on_close: list[Callable[[], None]] = []
        writer.transport.set_write_buffer_limits(high=self.buffer_high_bytes)

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def bytes_sent(self) -> int:
        return self._sent

    @property
    def has_own_connection(self) -> bool:
        return False

    async def send(self, kind: FrameKind, header: Buffer, body: Buffer = b"") -> None:
        self._require_member()
        await self._write(kind, header, body)

    async def refuse(self, header: Buffer) -> None:
        """Send a refusal, the only frame that an unauthenticated peer may get."""
        await self._write(FrameKind.REFUSAL, header, b"")

    async def refuse_and_close(self, header: Buffer) -> None:
        """Send a refusal without reading, then close."""
        cast(asyncio.Transport, self._writer.transport).pause_reading()
        with suppress(AtollError):
            await self.refuse(header)
        await self.close()

    async def refuse_after_reading(self, header: Buffer) -> None:
        """Refuse a peer that has already sent data.

        p2pd loses the refusal if the socket closes with bytes unread. So up to 1 KiB is read and discarded, for 1 s.
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
        """Close at once; unsent data is lost."""
        self._release()
        self._writer.transport.abort()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when this end closes the stream."""
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
                for piece in up.pieces(frame, self.max_write_bytes):
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

    def _is_over(self) -> bool:
        """Return whether this end can send no more."""
        return self._writer.is_closing()

    async def _read_prefix(self) -> Prefix:
        if self._prefix is None:
            start = await self._reader.readexactly(PREFIX.size)
            self._traffic.received[self.protocol] += len(start)
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
        self._traffic.received[self.protocol] += len(rest)
        header, body = bytes(rest[: prefix.header_bytes]), rest[prefix.header_bytes :]
        return check_frame(prefix, header, body, checksum_body=self.checksums_bodies)

    def _write_piece(self, piece: Buffer) -> None:
        self._writer.write(piece)
        self._sent += len(piece)
        self._traffic.count_sent(self.protocol, len(piece))

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
                    raise Unreachable(f"peer {self._peer_id} took no data for {STALL_TIMEOUT}") from error
                before = now
            except OSError as error:
                raise self._ended_error() from error

    def _progress(self) -> tuple[int, int]:
        """Return a value that grows while the peer takes data."""
        return 0, -self._writer.transport.get_write_buffer_size()

    def _release(self) -> None:
        # otherwise a peer could block all others by announcing many bytes
        self._traffic.down.cancel_slot(self._reserved_download_bytes)
        self._reserved_download_bytes = 0
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()

    def _ended_error(self) -> Unreachable:
        return Unreachable(f"peer {self._peer_id} ended the stream {self.protocol}")
