"""What a direct connection receives: bytes go from TLS to where they are wanted, in few turns of the event loop.

asyncio's own reader takes each of TLS's records into an object of its own, appends it to a buffer and cuts what was
asked for out of that. A large frame here is decrypted into its own memory. And while much of it is still to come, the
kernel is asked to wake us only when a good piece is there: at the rate of a home's link it would be woken for every few
kilobytes, and those turns of the event loop cost more processor time than decrypting what they bring (measured).
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

SMALL_BUFFER_BYTES = 64 * 1024  # that wait before anybody asks, about; larger reads have memory of their own
PIECE_BYTES = 128 * 1024  # for which we are woken in the middle of a large read, at most
WAIT_FRACTION_OF_RECEIVED = (
    16  # nor more than this part of all that came: the kernel sizes its window by what we take at a time
)
_RECORD_BYTES = 17 * 1024  # of a record that came in part, TLS holds less than this; nobody can ask for it again
_HAS_RECEIVE_LOW_WATER = sys.platform == "linux"


def bytes_to_wait_for(missing: int, before: int) -> int:
    """How much may be let gather in the kernel while a read lacks `missing` bytes, so that what comes is enough.

    `before`: bytes that this connection brought so far.
    """
    return max(1, min(PIECE_BYTES, before // WAIT_FRACTION_OF_RECEIVED, missing - _RECORD_BYTES))


class DirectReader(asyncio.StreamReader):
    """A reader with `readexactly` alone, fed in place by `DirectReaderProtocol`. One reads at a time."""

    def __init__(self) -> None:
        super().__init__(limit=SMALL_BUFFER_BYTES)
        self._small_buffer = bytearray(SMALL_BUFFER_BYTES)
        self._start = self._end = 0  # of what waits in it
        self._large: memoryview | None = None  # of a read that is under way
        self._filled = 0  # bytes of it
        self._overflow: bytearray | None = None  # holds the end of it and what follows, while TLS decrypts both
        self._more: asyncio.Future[None] | None = None
        self._is_paused = False
        self._receive_low_water = 1  # bytes, as the kernel was told
        self._came = 0  # bytes in all
        self._connection: asyncio.BaseTransport | None = None
        self.count_arrived: Callable[[int], None] | None = None  # told whenever bytes came

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
        """The next `n` bytes. Raises `IncompleteReadError` at the end, and whatever the connection broke with.

        One that is cancelled must be asked for again, as long: what came is kept.
        """
        if self._large is not None and len(self._large) != n:
            raise RuntimeError("another read was given up before, and must be asked for again")
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
        self._set_receive_low_water(bytes_to_wait_for(n - self._filled, self._came))
        while self._filled < n:
            self._resume()
            await self._wait(self._filled, n)
        found, self._large = self._large.obj, None
        assert isinstance(found, bytearray)
        return found

    async def _wait(self, have: int, n: int) -> None:
        """Until more came. Raises if nothing more will."""
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

    # --- from the connection -------------------------------------------------------------------------

    def buffer_for(self, expected: int) -> memoryview:
        """Where the next bytes go, with room for all that TLS has (`expected`, and the rest of a record).

        When the other side has ended, asyncio asks for what is left once; what does not fit then is lost.
        """
        self._overflow = None  # TLS may have asked before, for a record that was not whole, and brought nothing
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
        """So many bytes are in what `buffer_for` gave."""
        self._came += count
        if self.count_arrived is not None:
            self.count_arrived(count)
        beside, self._overflow = self._overflow, None
        into = min(count, self._missing)
        if into:
            if beside is not None:
                assert self._large is not None
                self._large[self._filled : self._filled + into] = memoryview(beside)[:into]
            self._filled += into
            self._set_receive_low_water(min(self._receive_low_water, bytes_to_wait_for(self._missing, self._came)))
        if beside is not None and count > into:
            self._make_room(count - into)
            self._small_buffer[self._end : self._end + count - into] = memoryview(beside)[into:count]
        self._end += count - into
        if self._end - self._start >= SMALL_BUFFER_BYTES and isinstance(self._connection, asyncio.ReadTransport):
            self._is_paused = True
            self._connection.pause_reading()
        if not self._missing:
            self._wake()

    @property
    def _missing(self) -> int:
        """Bytes that the large read under way lacks."""
        return len(self._large) - self._filled if self._large is not None else 0

    def _make_room(self, wanted: int) -> None:
        """For so many bytes behind what waits."""
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
        """Be woken when so many bytes are there; the kernel wakes us earlier where it can hold no more."""
        if not _HAS_RECEIVE_LOW_WATER or count == self._receive_low_water or self._connection is None:
            return
        sock = self._connection.get_extra_info("socket")
        if sock is None:  # the connection was lost: there is nothing to wait for
            return
        with suppress(OSError):  # closed meanwhile
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._receive_low_water = count


class DirectReaderProtocol(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Brings what TLS decrypts to an `DirectReader`."""

    def __init__(self, incoming: DirectReader) -> None:
        super().__init__(incoming)
        self._incoming = incoming

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming.buffer_for(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.on_received(nbytes)
