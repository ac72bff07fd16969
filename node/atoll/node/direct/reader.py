"""DirectReader: the receiving side of a direct connection, with few copies and few turns of the event loop.

asyncio's own reader copies each TLS record into an object, appends it to a buffer, and cuts the requested bytes out of
that. This reader lets TLS decrypt a large frame directly into the memory of that frame. While much of a frame is
missing, it asks the kernel to wake the process only for a large piece (SO_RCVLOWAT). On a home link the process would
otherwise wake for every few kilobytes, and each of these turns of the event loop costs more CPU time than the
decryption (measured).
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

SMALL_BUFFER_BYTES = 64 * 1024  # read ahead, about; larger reads have their own memory
PIECE_BYTES = 128 * 1024  # largest piece to wait for in the middle of a large read
# Wait for at most 1/16 of all bytes received: the kernel sizes its window by what the process takes at a time.
WAIT_FRACTION_OF_RECEIVED = 16
_RECORD_BYTES = 17 * 1024  # TLS holds less than this of an incomplete record
_HAS_RECEIVE_LOW_WATER = sys.platform == "linux"


def bytes_to_wait_for(missing: int, before: int) -> int:
    """Bytes that may gather in the kernel before it wakes the process, while a read lacks `missing` bytes.

    The result is at most the number of bytes that are still missing. `before`: bytes that this connection has received
    so far.
    """
    return max(1, min(PIECE_BYTES, before // WAIT_FRACTION_OF_RECEIVED, missing - _RECORD_BYTES))


class DirectReader(asyncio.StreamReader):
    """A reader with `readexactly` only, filled in place by `DirectReaderProtocol`. One read at a time."""

    def __init__(self) -> None:
        super().__init__(limit=SMALL_BUFFER_BYTES)
        self._small_buffer = bytearray(SMALL_BUFFER_BYTES)
        self._start = self._end = 0  # unread bytes in the small buffer
        self._large: memoryview | None = None  # memory of the large read in progress
        self._filled = 0  # bytes of the large read that have arrived
        self._overflow: bytearray | None = None  # for the end of the large read and the bytes that follow it
        self._more: asyncio.Future[None] | None = None  # resolves when the read in progress may continue
        self._is_paused = False
        self._receive_low_water = 1  # SO_RCVLOWAT in bytes
        self._received = 0  # bytes since the connection began
        self._connection: asyncio.BaseTransport | None = None
        self.count_arrived: Callable[[int], None] | None = None  # called with the number of bytes that arrived

    def set_transport(self, transport: asyncio.BaseTransport) -> None:
        super().set_transport(transport)
        self._connection = transport

    def at_eof(self) -> bool:
        return super().at_eof() and self._start == self._end

    def feed_eof(self) -> None:
        super().feed_eof()
        self._wake()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self._wake()

    async def readexactly(self, n: int) -> bytes | bytearray:  # type: ignore[override]
        """Return the next `n` bytes. Raises `IncompleteReadError` at the end, or the error of the connection.

        After a cancelled read, call again with the same `n`; received bytes are kept.
        """
        if self._large is not None and len(self._large) != n:
            raise RuntimeError(
                f"a read of {len(self._large)} bytes was cancelled; call readexactly with that size again, not {n}"
            )
        if n > SMALL_BUFFER_BYTES:
            return await self._read_large(n)
        while self._end - self._start < n:
            await self._wait(self._end - self._start, n)
        found = bytes(memoryview(self._small_buffer)[self._start : self._start + n])
        self._start += n
        if self._start == self._end:
            self._start = self._end = 0
        self._resume()
        return found

    async def _read_large(self, n: int) -> bytearray:
        if self._large is None:
            self._large = memoryview(bytearray(n))
            self._filled = min(n, self._end - self._start)
            self._large[: self._filled] = memoryview(self._small_buffer)[self._start : self._start + self._filled]
            self._start += self._filled
        self._set_receive_low_water(bytes_to_wait_for(n - self._filled, self._received))
        while self._filled < n:
            self._resume()
            await self._wait(self._filled, n)
        found, self._large = self._large.obj, None
        assert isinstance(found, bytearray)
        return found

    async def _wait(self, have: int, n: int) -> None:
        """Wait until more bytes arrived. Raises if no more can arrive."""
        broken = self.exception()
        if broken is not None:
            raise broken
        if super().at_eof():
            raise asyncio.IncompleteReadError(b"", n - have)
        self._more = asyncio.get_running_loop().create_future()
        try:
            await self._more
        finally:
            self._more = None

    # --- called by the protocol ----------------------------------------------------------------------

    def buffer_for(self, expected: int) -> memoryview:
        """Return memory for the next bytes, with room for all that TLS has: `expected` and the rest of a record.

        After the peer has closed, asyncio asks for the remaining bytes once; bytes that do not fit then are lost.
        """
        self._overflow = None  # TLS may have asked before, for an incomplete record, and delivered nothing
        wanted, missing = expected + _RECORD_BYTES, self._missing
        if not missing:
            self._make_room(wanted)
            return memoryview(self._small_buffer)[self._end :]
        assert self._large is not None
        if missing >= wanted:
            return self._large[self._filled :]
        self._overflow = bytearray(wanted)
        return memoryview(self._overflow)

    def on_received(self, count: int) -> None:
        """Take the `count` bytes that TLS wrote into the memory of `buffer_for`."""
        self._received += count
        if self.count_arrived is not None:
            self.count_arrived(count)
        overflow, self._overflow = self._overflow, None
        large_bytes = min(count, self._missing)
        if large_bytes:
            if overflow is not None:
                assert self._large is not None
                self._large[self._filled : self._filled + large_bytes] = memoryview(overflow)[:large_bytes]
            self._filled += large_bytes
            self._set_receive_low_water(min(self._receive_low_water, bytes_to_wait_for(self._missing, self._received)))
        if overflow is not None and count > large_bytes:
            self._make_room(count - large_bytes)
            self._small_buffer[self._end : self._end + count - large_bytes] = memoryview(overflow)[large_bytes:count]
        self._end += count - large_bytes
        if self._end - self._start >= SMALL_BUFFER_BYTES and isinstance(self._connection, asyncio.ReadTransport):
            self._is_paused = True
            self._connection.pause_reading()
        if not self._missing:
            self._wake()

    @property
    def _missing(self) -> int:
        """Bytes that the large read in progress lacks."""
        return len(self._large) - self._filled if self._large is not None else 0

    def _make_room(self, wanted: int) -> None:
        """Make room for `wanted` bytes behind the unread bytes of the small buffer."""
        if self._end + wanted <= len(self._small_buffer):
            return
        waiting = bytes(memoryview(self._small_buffer)[self._start : self._end])
        if len(waiting) + wanted > len(self._small_buffer):
            self._small_buffer = bytearray(len(waiting) + wanted)
        self._small_buffer[: len(waiting)] = waiting
        self._start, self._end = 0, len(waiting)

    def _resume(self) -> None:
        if self._is_paused and isinstance(self._connection, asyncio.ReadTransport):
            self._is_paused = False
            self._connection.resume_reading()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def _set_receive_low_water(self, count: int) -> None:
        """Ask the kernel to wake the process when `count` bytes have arrived, or earlier if its buffer is full."""
        if not _HAS_RECEIVE_LOW_WATER or count == self._receive_low_water or self._connection is None:
            return
        sock = self._connection.get_extra_info("socket")
        if sock is None:  # the connection was lost
            return
        with suppress(OSError):  # closed in the meantime
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._receive_low_water = count


class DirectReaderProtocol(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """asyncio protocol that lets TLS decrypt into the memory of a `DirectReader`."""

    def __init__(self, reader: DirectReader) -> None:
        super().__init__(reader)
        self._direct_reader = reader

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._direct_reader.buffer_for(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self._direct_reader.on_received(nbytes)
