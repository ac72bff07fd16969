"""Stripes: one stream for bulk data over four libp2p streams, in round-robin units of 64 KiB (as in RAID 0).

    bytes        0 … 64 Ki   → stripe 0
              64 Ki … 128 Ki → stripe 1     …     then 0 again; in both directions

Why: all libp2p streams between two peers share one connection, and yamux gives each a window that can grow. When a
window doubles, the receiver announces only half of what it grants (go-yamux 4.0.1, `sendWindowUpdate`: no message
contains what the first `GrowTo` adds). The sender may then send little more than one update's worth, and stalls for
about one round trip in five. Four stripes stall at different times, so the connection stays busy
(docs/adr/0010-several-streams-for-bulk.md).

The dialler opens all stripes, sends a `Stripe` frame on each that says which stream it belongs to, and waits for the
accept, as on any stream. The acceptor reads that frame from members only, and serves the stream when all stripes have
arrived.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import cast

from google.protobuf.message import DecodeError

from atoll.core.errors import AtollError, DeadlineExceeded, HelloRequired, PeerMisbehaved, Unreachable, first_error
from atoll.core.frames import Buffer, Frame, FrameKind
from atoll.node.wire.gate import Gate
from atoll.node.wire.peer_slots import PeerSlots
from atoll.node.wire.refusals import printable
from atoll.node.wire.streams import ByteReader, ByteTransport, ByteWriter
from atoll.node.wire.transport import Stream
from atoll.v1 import dataplane_pb2 as dp

PROTOCOL = "/atoll/stripes/1"
STRIPES = 4
STRIPE_UNIT_BYTES = 64 * 1024  # on one stripe before the next stripe's turn; a fresh yamux window has room for four
ASSEMBLE_TIMEOUT = timedelta(seconds=20)  # from the first stripe to the last: each may queue behind bulk data
MAX_PARTIAL_PER_PEER = 18  # streams of which stripes are missing
MAX_STRIPE_BYTES = 256  # of a `Stripe` message
_STREAM_ID_BYTES = 16
_POLL_SECONDS = 1.0  # a read that waits for one stripe checks this often whether another has ended
_END_GRACE_SECONDS = 10.0  # without a byte, after which the end of any stripe ends the read

ReaderWriter = tuple[asyncio.StreamReader, asyncio.StreamWriter]  # of one stripe
StripedReaderWriter = tuple[ByteReader, ByteWriter]  # of all stripes of a stream


class StripedReader:
    """Reads bytes from all stripes in the order in which `StripedWriter` wrote them."""

    def __init__(self, readers: Sequence[asyncio.StreamReader]) -> None:
        self._readers = readers
        self._at = 0  # bytes read so far
        self._requested: int | None = None  # size of the read in progress
        self._found = bytearray()  # bytes of that read so far
        self._ended_at: float | None = None  # when an end of a stripe was noticed; None once more bytes arrive

    async def readexactly(self, n: int, /) -> Buffer:
        """Return the next `n` bytes. Raises `IncompleteReadError` at the end, or the error of a stripe.

        After a cancelled read, call again with the same `n`; received bytes are kept.
        """
        if self._requested not in (None, n):
            raise RuntimeError(
                f"a read of {self._requested} bytes was cancelled; call readexactly with that size again, not {n}"
            )
        self._requested = n
        while (missing := n - len(self._found)) > 0:  # memory grows with received bytes, not with announced ones
            piece = await self._next(missing)
            self._found += piece
            self._at += len(piece)
        found, self._found, self._requested = self._found, bytearray(), None
        return found

    async def _next(self, missing: int) -> bytes:
        """Read some of the `missing` bytes from the stripe whose turn it is."""
        turn, used = divmod(self._at, STRIPE_UNIT_BYTES)
        ahead = -(-(used + missing) // STRIPE_UNIT_BYTES)  # number of units that contain the missing bytes
        streams = len(self._readers)
        needed = [self._readers[(turn + later) % streams] for later in range(min(ahead, streams))]
        while True:
            self._check(needed)
            try:
                async with asyncio.timeout(_POLL_SECONDS):
                    piece = await needed[0].read(min(missing, STRIPE_UNIT_BYTES - used))
            except TimeoutError:
                continue
            self._ended_at = None
            if not piece:
                raise asyncio.IncompleteReadError(b"", missing)
            return piece

    def _check(self, needed: Sequence[asyncio.StreamReader]) -> None:
        """Raise `IncompleteReadError` if a stripe that is needed for this read has ended.

        The end of another stripe may overtake bytes that are still in transit. It ends the read only after
        `_END_GRACE_SECONDS` without a byte.
        """
        if not any(_is_over(reader) for reader in self._readers):
            return
        now = asyncio.get_running_loop().time()
        if self._ended_at is None:
            self._ended_at = now
        if any(_is_over(reader) for reader in needed) or now - self._ended_at >= _END_GRACE_SECONDS:
            raise asyncio.IncompleteReadError(b"", 1)


def _is_over(reader: asyncio.StreamReader) -> bool:
    """Return whether a reader can return no more bytes."""
    return reader.at_eof() or reader.exception() is not None


class StripedWriter:
    """Writes bytes to all stripes in turn. It is also its own transport."""

    def __init__(self, writers: Sequence[asyncio.StreamWriter]) -> None:
        self._writers = writers
        self._at = 0  # bytes written so far

    @property
    def transport(self) -> ByteTransport:
        return self

    def write(self, data: Buffer, /) -> None:
        view = memoryview(data)
        while view:
            turn, used = divmod(self._at, STRIPE_UNIT_BYTES)
            piece, view = view[: STRIPE_UNIT_BYTES - used], view[STRIPE_UNIT_BYTES - used :]
            self._writers[turn % len(self._writers)].write(piece)
            self._at += len(piece)

    async def drain(self) -> None:
        """Wait until all stripes have room; meanwhile the other stripes send."""
        for writer in self._writers:
            await writer.drain()

    def is_closing(self) -> bool:
        """Return whether any stripe is closing, which ends the whole stream."""
        return any(writer.is_closing() for writer in self._writers)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def wait_closed(self) -> None:
        for writer in self._writers:
            await writer.wait_closed()

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def pause_reading(self) -> None:
        for writer in self._writers:
            cast(asyncio.Transport, writer.transport).pause_reading()

    def set_write_buffer_limits(self, high: int) -> None:
        for writer in self._writers:
            writer.transport.set_write_buffer_limits(high)

    def get_write_buffer_size(self) -> int:
        return sum(writer.transport.get_write_buffer_size() for writer in self._writers)


def join_stripes(ends: Sequence[ReaderWriter]) -> StripedReaderWriter:
    """Join the stripes of a stream, in order of their index, into one reader and one writer."""
    return StripedReader([reader for reader, _ in ends]), StripedWriter([writer for _, writer in ends])


# --- the dialler's side ----------------------------------------------------------------------------------


async def open_stripes(
    open_one: Callable[[], Awaitable[tuple[Stream, ReaderWriter]]], protocol: str
) -> StripedReaderWriter:
    """Open all stripes of a stream of `protocol`. Raises the error of the first stripe that fails."""
    stream_id = secrets.token_bytes(_STREAM_ID_BYTES)
    opened: dict[int, ReaderWriter] = {}

    async def open_next(index: int) -> None:
        stream, ends = await open_one()
        opened[index] = ends
        stripe = dp.Stripe(conversation=stream_id, index=index, protocol=protocol)
        await stream.send(FrameKind.MESSAGE, stripe.SerializeToString())

    try:
        async with asyncio.TaskGroup() as group:
            for index in range(STRIPES):
                group.create_task(open_next(index))
    except BaseException as error:
        for _, writer in opened.values():
            writer.transport.abort()
        if isinstance(error, ExceptionGroup):
            raise first_error(error) from error
        raise
    return join_stripes([opened[index] for index in range(STRIPES)])


# --- the acceptor's side ---------------------------------------------------------------------------------


class _PartialStream:
    """A stream of which stripes are missing. The gate can abort it."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.ends: dict[int, ReaderWriter] = {}  # by index
        self.complete = asyncio.Event()  # set when all stripes have arrived, or on an error
        self.error: AtollError | None = None

    def join(self, stripe: dp.Stripe, ends: ReaderWriter) -> None:
        """Add a stripe. Raises `PeerMisbehaved`."""
        if stripe.protocol != self.protocol or stripe.index >= STRIPES or stripe.index in self.ends:
            raise PeerMisbehaved(
                f"stripe {stripe.index} of {printable(stripe.protocol)} does not fit its stream: the protocol is "
                f"{self.protocol}, the index must be below {STRIPES}, and the stream has {sorted(self.ends)}"
            )
        self.ends[stripe.index] = ends
        if len(self.ends) == STRIPES:
            self.complete.set()

    async def wait(self) -> None:
        """Wait until the stream is complete; fail it if a stripe closes or `ASSEMBLE_TIMEOUT` passes."""
        deadline = asyncio.get_running_loop().time() + ASSEMBLE_TIMEOUT.total_seconds()
        while not self.complete.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self.complete.wait()
            if any(_is_over(reader) for reader, _ in self.ends.values()):
                self.fail(Unreachable("the peer closed a stripe before all stripes had arrived"))
            elif asyncio.get_running_loop().time() >= deadline:
                self.fail(DeadlineExceeded(f"{len(self.ends)} of {STRIPES} stripes arrived within {ASSEMBLE_TIMEOUT}"))

    def fail(self, error: AtollError) -> None:
        """Fail with `error`, unless the stream is complete or has failed already."""
        if not self.complete.is_set():
            self.error = error
            self.complete.set()

    def abort(self) -> None:
        self.fail(HelloRequired("the peer was evicted; it must say hello again"))


class StripeAssembler:
    """Collects the stripes of incoming streams."""

    def __init__(self, gate: Gate, protocols: Collection[str]) -> None:
        """`protocols`: those that may use stripes."""
        self._gate = gate
        self._protocols = protocols
        self._open: dict[tuple[str, bytes], _PartialStream] = {}  # by peer and stream id
        self._partial = PeerSlots[str](MAX_PARTIAL_PER_PEER)

    async def add(self, peer_id: str, frame: Frame, ends: ReaderWriter) -> tuple[str, StripedReaderWriter] | None:
        """Add a stripe and wait until its stream is complete.

        Returns the protocol and the joined stripes to the caller with the first stripe, and None to the others.
        `frame` is the first frame of the stripe. Raises `PeerMisbehaved`. For all stripes of a stream, raises
        `HelloRequired` if the peer is evicted, `DeadlineExceeded` if a stripe does not arrive in time, and
        `Unreachable` if a stripe closes.
        """
        stripe = self._checked(frame)
        key = peer_id, stripe.conversation
        found = self._open.get(key)
        if found is not None:
            found.join(stripe, ends)
            await found.complete.wait()  # the task of the first stripe keeps the deadline
            if found.error is not None:
                raise found.error
            return None
        with self._partial.hold(peer_id, "streams of which stripes are missing"):
            partial = _PartialStream(stripe.protocol)
            partial.join(stripe, ends)
            self._open[key] = partial
            self._gate.track_stream(peer_id, partial)
            try:
                await partial.wait()
            finally:
                partial.fail(Unreachable("this node stops"))  # no effect if it is complete
                self._gate.untrack_stream(peer_id, partial)
                del self._open[key]
        if partial.error is not None:
            raise partial.error
        return partial.protocol, join_stripes([partial.ends[index] for index in range(STRIPES)])

    def _checked(self, frame: Frame) -> dp.Stripe:
        try:
            stripe = dp.Stripe.FromString(frame.header)
        except DecodeError as error:
            raise PeerMisbehaved("a stripe must begin with a Stripe message") from error
        if frame.kind is not FrameKind.MESSAGE or frame.body or len(stripe.conversation) != _STREAM_ID_BYTES:
            raise PeerMisbehaved(f"a stripe must begin with a Stripe message with an id of {_STREAM_ID_BYTES} bytes")
        if stripe.protocol not in self._protocols:
            raise PeerMisbehaved(f"stripes do not carry {printable(stripe.protocol)}; use a single stream")
        return stripe
