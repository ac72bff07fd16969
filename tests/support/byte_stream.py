"""The two ends of a socket, without a socket: what a peer wrote is given at once, what it is told is kept."""

from __future__ import annotations

import asyncio


class RecordingWriter:
    """What `SocketStream` needs of a writer and its transport."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False
        self.transport = self

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    abort = close

    async def wait_closed(self) -> None:
        pass


def reader_of(data: bytes, *, ends: bool = True) -> asyncio.StreamReader:
    """A reader that has `data`; without an end its peer stays silent afterwards."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    if ends:
        reader.feed_eof()
    return reader
