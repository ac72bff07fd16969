"""The socket pair between the swarm process, which has the streams, and the trainer process, which has the stage.

    +------+-------+-------------+-------+---------+
    | word | stage | incarnation | bytes | payload |      big-endian: 1, 2, 8, 4 bytes, and as many as they say
    +------+-------+-------------+-------+---------+

`stage` is the neighbour that a message comes from or goes to. Messages travel as on streams, a header and then bodies,
so neither process holds more of one than a frame that it only passes on. The trainer has few frames for each neighbour
on the cable at a time and waits for `SENT`: a slow neighbour holds up nobody else, and what waits for it waits in
the trainer, bounded by the schedule.

This is the swarm process's end; the trainer's is `cable_end.py`. Both are the same version of the same code.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from atoll.core.errors import AtollError, ChildDied, error_class
from atoll.core.frames import Buffer
from atoll.v1 import dataplane_pb2 as dp

PREFIX = struct.Struct(">BHQI")
BODY_BYTES = 4 << 20
WINDOW_FRAMES = 2  # to one neighbour, on the cable or on its way to the stream
_BUFFER_BYTES = 1 << 20


class FrameType(IntEnum):
    """What a frame is."""

    ATTACH = 1  # to the trainer: the route begins anew, all links are fresh
    DETACH = 2  # to the trainer: it is over; payload: why, a Refusal
    HEADER = 3  # both ways: a StageMessage
    BODY = 4  # both ways: bytes of the message whose header came last for this stage
    SENT = 5  # to the trainer: a frame for this stage went out
    BREAK = 6  # from the trainer: end this incarnation; payload: why, a Refusal
    CODEC = 7  # to the trainer: how tensors for this stage are encoded from now on; payload: the codec's name


@dataclass(frozen=True, slots=True)
class SocketFrame:
    """One frame."""

    word: FrameType
    stage: int
    incarnation: int
    payload: bytes = b""


def pack_prefix(word: FrameType, stage: int, incarnation: int, payload_bytes: int) -> bytes:
    """What goes before the payload."""
    return PREFIX.pack(word, stage, incarnation, payload_bytes)


def encode_error(error: AtollError) -> bytes:
    """An error as a payload."""
    return dp.Refusal(reason=error.reason, message=str(error)).SerializeToString()


def decode_error(payload: bytes) -> AtollError:
    """The error of a payload."""
    refusal = dp.Refusal.FromString(payload)
    return error_class(refusal.reason)(refusal.message)


class StageSocket:
    """The swarm process's end. One bridge uses it at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._prefix: tuple[FrameType, int, int, int] | None = None  # of a frame whose payload is not here
        writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    @classmethod
    async def from_socket(cls, sock: socket.socket) -> StageSocket:
        """Takes the socket over."""
        return cls(*await asyncio.open_connection(sock=sock, limit=_BUFFER_BYTES))

    async def send(self, word: FrameType, stage: int, incarnation: int, payload: Buffer = b"") -> None:
        """Returns when there is room for more. Raises `ChildDied`."""
        self.send_nowait(word, stage, incarnation, payload)
        try:
            await self._writer.drain()
        except OSError as error:
            raise _gone() from error

    def send_nowait(self, word: FrameType, stage: int, incarnation: int, payload: Buffer = b"") -> None:
        """Without waiting for room, for what is small and rare: a trainer that stands still must not hold us up."""
        self._writer.write(pack_prefix(word, stage, incarnation, len(payload)))
        if payload:  # of no bytes asyncio (from 3.12 on) would keep trying to send them, as fast as it can
            self._writer.write(payload)

    async def receive(self) -> SocketFrame:
        """The next frame; when cancelled, it comes next time. Raises `ChildDied`."""
        try:
            if self._prefix is None:
                word, stage, incarnation, size = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
                self._prefix = FrameType(word), stage, incarnation, size
            kind, stage, incarnation, size = self._prefix
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise _gone() from error
        self._prefix = None
        return SocketFrame(kind, stage, incarnation, payload)

    def close(self) -> None:
        """Never raises."""
        self._writer.transport.abort()


def _gone() -> ChildDied:
    return ChildDied("the trainer closed its end of the cable")
