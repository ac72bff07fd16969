"""The socket pair between the daemon, which has the streams, and the trainer process, which has the stage.

    +------+-------+-------------+-------+---------+
    | type | stage | incarnation | bytes | payload |      big-endian: 1, 2, 8, 4 bytes; `bytes` is the payload's length
    +------+-------+-------------+-------+---------+

`stage` is the neighbour that sends or receives a message. Messages have the same form as on streams, a header and then
bodies, so the daemon holds at most one frame of a message. The trainer sends at most `WINDOW_FRAMES` frames per
neighbour and then waits for `SENT`. So a slow neighbour does not delay the others. Its messages wait in the trainer,
bounded by the schedule.

This module has the daemon's end; `stage_io.py` has the trainer's. Both run the same version of the same code.
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
WINDOW_FRAMES = 2  # to one neighbour, on this socket or waiting for its stream
_BUFFER_BYTES = 1 << 20


class FrameType(IntEnum):
    """Type of a frame."""

    ATTACH = 1  # to the trainer: a new incarnation of the route begins
    DETACH = 2  # to the trainer: the incarnation is over; payload: the reason, a Refusal
    HEADER = 3  # both ways: a StageMessage
    BODY = 4  # both ways: bytes of the message whose header came last for this stage
    SENT = 5  # to the trainer: a frame for this stage was sent on its stream
    BREAK = 6  # from the trainer: end this incarnation; payload: the reason, a Refusal
    CODEC = 7  # to the trainer: codec for tensors to this stage from now on; payload: the codec's name


@dataclass(frozen=True, slots=True)
class SocketFrame:
    """One frame on the stage socket."""

    type: FrameType
    stage: int
    incarnation: int
    payload: bytes = b""


def pack_prefix(frame_type: FrameType, stage: int, incarnation: int, payload_bytes: int) -> bytes:
    """Encode the fields before the payload."""
    return PREFIX.pack(frame_type, stage, incarnation, payload_bytes)


def encode_error(error: AtollError) -> bytes:
    """Encode an error as a payload."""
    return dp.Refusal(reason=error.reason, message=str(error)).SerializeToString()


def decode_error(payload: bytes) -> AtollError:
    """Decode the error in a payload."""
    refusal = dp.Refusal.FromString(payload)
    return error_class(refusal.reason)(refusal.message)


class StageSocket:
    """The daemon's end of the socket. One `RouteConnection` uses it at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._prefix: tuple[FrameType, int, int, int] | None = None  # of a frame whose payload is still to come
        writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    @classmethod
    async def from_socket(cls, sock: socket.socket) -> StageSocket:
        """Wrap a socket and take ownership of it."""
        return cls(*await asyncio.open_connection(sock=sock, limit=_BUFFER_BYTES))

    async def send(self, frame_type: FrameType, stage: int, incarnation: int, payload: Buffer = b"") -> None:
        """Send a frame; returns when the buffer has space again. Raises `ChildDied`."""
        self.send_nowait(frame_type, stage, incarnation, payload)
        try:
            await self._writer.drain()
        except OSError as error:
            raise _gone() from error

    def send_nowait(self, frame_type: FrameType, stage: int, incarnation: int, payload: Buffer = b"") -> None:
        """Send a small and rare frame without waiting for buffer space, so that a hanging trainer does not block."""
        self._writer.write(pack_prefix(frame_type, stage, incarnation, len(payload)))
        if payload:  # asyncio (from 3.12 on) would retry an empty write in a busy loop
            self._writer.write(payload)

    async def receive(self) -> SocketFrame:
        """Return the next frame. If the call is cancelled, the next call returns the frame. Raises `ChildDied`."""
        try:
            if self._prefix is None:
                frame_type, stage, incarnation, size = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
                self._prefix = FrameType(frame_type), stage, incarnation, size
            kind, stage, incarnation, size = self._prefix
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise _gone() from error
        self._prefix = None
        return SocketFrame(kind, stage, incarnation, payload)

    def close(self) -> None:
        """Close the socket. Never raises."""
        self._writer.transport.abort()


def _gone() -> ChildDied:
    return ChildDied("the trainer closed the stage socket")
