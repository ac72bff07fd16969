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
from contextlib import suppress

SPARE_BYTES = 64 * 1024  # taken before anybody asks; larger reads have memory of their own
PIECE_BYTES = 128 * 1024  # for which we are woken in the middle of a large read, at most
YOUNG = 16  # nor more than this part of all that came: the kernel sizes its window by what we take at a time
_RECORD_BYTES = 17 * 1024  # of a record that came in part, TLS holds less than this; nobody can ask for it again
_WAITS_FOR_PIECES = sys.platform == "linux"


def bytes_to_wait_for(missing: int, before: int) -> int:
    """How much may be let gather in the kernel while a read lacks `missing` bytes, so that what comes is enough.

    `before`: bytes that this connection brought so far.
    """
    return max(1, min(PIECE_BYTES, before // YOUNG, missing - _RECORD_BYTES))


class Incoming(asyncio.StreamReader):
    """A reader with `readexactly` alone, fed in place by `Ends`. One reads at a time."""

    def __init__(self) -> None:
        super().__init__(limit=SPARE_BYTES)
        self._spare = bytearray(SPARE_BYTES)
        self._start = self._end = 0  # of what waits in it
        self._large: memoryview | None = None  # of a read that is under way
        self._filled = 0  # bytes of it
        self._more: asyncio.Future[None] | None = None
        self._is_paused = False
        self._gathers = 1  # bytes, as the kernel was told
        self._came = 0  # bytes in all
        self._connection: asyncio.BaseTransport | None = None

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
        if n > SPARE_BYTES:
            return await self._read_large(n)
        while self._end - self._start < n:
            await self._wait(self._end - self._start, n)
        found = bytes(memoryview(self._spare)[self._start : self._start + n])
        self._start += n
        self._resume()
        return found

    async def _read_large(self, n: int) -> bytearray:
        if self._large is None:
            self._large = memoryview(bytearray(n))
            self._filled = self._end - self._start
            self._large[: self._filled] = memoryview(self._spare)[self._start : self._end]
            self._start = self._end = 0
        self._gather(bytes_to_wait_for(n - self._filled, self._came))
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

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._large is not None and self._filled < len(self._large):
            return self._large[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:  # what waits goes to the front
            waiting = self._spare[self._start : self._end]
            self._spare[: len(waiting)] = waiting
            self._start, self._end = 0, len(waiting)
        return memoryview(self._spare)[self._end :]

    def came(self, count: int) -> None:
        """So many bytes are in what `room` gave."""
        self._came += count
        if self._large is not None and self._filled < len(self._large):
            self._filled += count
            missing = len(self._large) - self._filled
            self._gather(min(self._gathers, bytes_to_wait_for(missing, self._came)))
            if missing == 0:
                self._wake()
            return
        self._end += count
        if self._end - self._start == SPARE_BYTES and isinstance(self._connection, asyncio.ReadTransport):
            self._is_paused = True
            self._connection.pause_reading()
        self._wake()

    def _resume(self) -> None:
        if self._is_paused and isinstance(self._connection, asyncio.ReadTransport):
            self._is_paused = False
            self._connection.resume_reading()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def _gather(self, count: int) -> None:
        """Be woken when so many bytes are there; the kernel wakes us earlier where it can hold no more."""
        if not _WAITS_FOR_PIECES or count == self._gathers or self._connection is None:
            return
        sock = self._connection.get_extra_info("socket")
        with suppress(OSError):  # closed meanwhile
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._gathers = count


class Ends(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Brings what TLS decrypts to an `Incoming`."""

    def __init__(self, incoming: Incoming) -> None:
        super().__init__(incoming)
        self._incoming = incoming

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.came(nbytes)
