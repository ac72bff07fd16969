"""One conversation over several libp2p streams at once: its bytes go out on one after another, a little on each.

    bytes        0 … 64 Ki   → stream 0
              64 Ki … 128 Ki → stream 1     …     then 0 again; in both directions

All streams between two peers share one connection, and each has a window of its own, which yamux lets grow. But when
it doubles, the sender is told of half of what the receiver grants (go-yamux 4.0.1, `sendWindowUpdate`: what the first
`GrowTo` adds is in no message), so that from then on it may send hardly more than one update's worth, and has nothing
to send until the next: a stream stands still for about a round trip in five. Several wait one after another, and the
connection is busy all the time (docs/adr/0010-several-streams-for-bulk.md).

The dialler opens all of them, says on each what it belongs to, and waits to be let in, as on any stream. The acceptor
reads that word from members only, and begins to serve when the last of the streams is there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import cast

from google.protobuf.message import DecodeError

from atoll.core.errors import AtollError, DeadlineExceeded, HelloRequired, PeerMisbehaved, Unreachable, first_error
from atoll.core.frames import Buffer, Frame, FrameKind
from atoll.node.wire.gate import Gate
from atoll.node.wire.streams import ByteReader, ByteTransport, ByteWriter
from atoll.node.wire.transport import Stream
from atoll.v1 import dataplane_pb2 as wire

PROTOCOL = "/atoll/stripes/1"
STRIPES = 4
STRIPE_UNIT_BYTES = 64 * 1024  # on one stream before it is the next one's turn; a fresh window has four of them
ASSEMBLE_TIMEOUT = timedelta(seconds=20)  # from the first stream of a conversation to the last: each queues behind bulk
MAX_PARTIAL_PER_PEER = 18  # conversations of which some streams are missing
MAX_STRIPE_BYTES = 256  # of a `Stripe`
_CONVERSATION_ID_BYTES = 16
_POLL_SECONDS = 1.0  # after which who waits on one stream looks whether another one has ended
_END_GRACE_SECONDS = 10.0  # without a byte on the one

ReaderWriter = tuple[asyncio.StreamReader, asyncio.StreamWriter]  # of one stream
StripedReaderWriter = tuple[ByteReader, ByteWriter]  # of a conversation


class StripedReader:
    """The bytes of several readers in the order in which the other side dealt them."""

    def __init__(self, readers: Sequence[asyncio.StreamReader]) -> None:
        self._readers = readers
        self._at = 0  # bytes read
        self._asked: int | None = None  # by a read under way
        self._found = bytearray()  # of it
        self._ended_at: float | None = None  # when one of them was seen to have ended, and nothing came since

    async def readexactly(self, n: int, /) -> Buffer:
        """The next `n` bytes. Raises `IncompleteReadError` at the end, and whatever a stream broke with.

        One that is cancelled must be asked for again, as long: what came is kept.
        """
        if self._asked not in (None, n):
            raise RuntimeError("another read was given up before, and must be asked for again")
        self._asked = n
        while (missing := n - len(self._found)) > 0:  # memory grows with what came, not with what was announced
            piece = await self._next(missing)
            self._found += piece
            self._at += len(piece)
        found, self._found, self._asked = self._found, bytearray(), None
        return found

    async def _next(self, missing: int) -> bytes:
        """Some of so many bytes, from the stream whose turn it is."""
        turn, used = divmod(self._at, STRIPE_UNIT_BYTES)
        ahead = -(-(used + missing) // STRIPE_UNIT_BYTES)  # turns in which they come
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
        """Raises `IncompleteReadError` when one that has some of the bytes has ended.

        The end of another one may be ahead of bytes that are still under way, but not for long without any of them.
        """
        if not any(_is_over(reader) for reader in self._readers):
            return
        now = asyncio.get_running_loop().time()
        if self._ended_at is None:
            self._ended_at = now
        if any(_is_over(reader) for reader in needed) or now - self._ended_at >= _END_GRACE_SECONDS:
            raise asyncio.IncompleteReadError(b"", 1)


def _is_over(reader: asyncio.StreamReader) -> bool:
    """Whether nothing more can be read."""
    return reader.at_eof() or reader.exception() is not None


class StripedWriter:
    """Deals bytes to several writers; its own transport, too."""

    def __init__(self, writers: Sequence[asyncio.StreamWriter]) -> None:
        self._writers = writers
        self._at = 0  # bytes written

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
        """Until all of them have room; while one is waited for the others send, too."""
        for writer in self._writers:
            await writer.drain()

    def is_closing(self) -> bool:
        """One that is gone is the end of all."""
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
    """One reader and one writer of the streams of a conversation, in their order."""
    return StripedReader([reader for reader, _ in ends]), StripedWriter([writer for _, writer in ends])


# --- the dialler's side ----------------------------------------------------------------------------------


async def open_stripes(
    open_one: Callable[[], Awaitable[tuple[Stream, ReaderWriter]]], protocol: str
) -> StripedReaderWriter:
    """Open several streams and say on each what it is part of. Raises what the first of them fails with."""
    conversation = secrets.token_bytes(_CONVERSATION_ID_BYTES)
    opened: dict[int, ReaderWriter] = {}

    async def open_next(index: int) -> None:
        stream, ends = await open_one()
        opened[index] = ends
        stripe = wire.Stripe(conversation=conversation, index=index, protocol=protocol)
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


class _PartialConversation:
    """A conversation of which streams are missing; what the gate holds of it."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.ends: dict[int, ReaderWriter] = {}  # by index
        self.complete = asyncio.Event()  # all are here, or it failed
        self.error: AtollError | None = None

    def join(self, stripe: wire.Stripe, ends: ReaderWriter) -> None:
        """Raises `PeerMisbehaved`."""
        if stripe.protocol != self.protocol or stripe.index >= STRIPES or stripe.index in self.ends:
            raise PeerMisbehaved("a stream does not fit into its conversation")
        self.ends[stripe.index] = ends
        if len(self.ends) == STRIPES:
            self.complete.set()

    async def wait(self) -> None:
        """For the rest, and for whoever among those that came hangs up."""
        last = asyncio.get_running_loop().time() + ASSEMBLE_TIMEOUT.total_seconds()
        while not self.complete.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self.complete.wait()
            if any(_is_over(reader) for reader, _ in self.ends.values()):
                self.fail(Unreachable("it hung up before all streams came"))
            elif asyncio.get_running_loop().time() >= last:
                self.fail(DeadlineExceeded(f"{len(self.ends)} of {STRIPES} streams came"))

    def fail(self, error: AtollError) -> None:
        """Once it is complete, nothing can."""
        if not self.complete.is_set():
            self.error = error
            self.complete.set()

    def abort(self) -> None:
        self.fail(HelloRequired("this peer is no member any more"))


class StripeAssembler:
    """Members' streams that wait for the others of their conversation."""

    def __init__(self, gate: Gate, protocols: Collection[str]) -> None:
        """`protocols`: what may be spoken so."""
        self._gate = gate
        self._protocols = protocols
        self._open: dict[tuple[str, bytes], _PartialConversation] = {}  # by peer and conversation
        self._count: Counter[str] = Counter()  # of them, by peer

    async def add(self, peer_id: str, frame: Frame, ends: ReaderWriter) -> tuple[str, StripedReaderWriter] | None:
        """Wait until all are here. With the first that came, the conversation's protocol and all of it; else None.

        `frame` is the first on that stream. Raises `PeerMisbehaved`; on all that came `HelloRequired` when the peer is
        evicted, `DeadlineExceeded` when others do not come, `Unreachable` when one hangs up.
        """
        stripe = self._checked(frame)
        key = peer_id, stripe.conversation
        found = self._open.get(key)
        if found is not None:
            found.join(stripe, ends)
            await found.complete.wait()  # within the time that the first has
            if found.error is not None:
                raise found.error
            return None
        if self._count[peer_id] >= MAX_PARTIAL_PER_PEER:
            raise PeerMisbehaved("too many conversations wait for the rest of their streams")
        partial = _PartialConversation(stripe.protocol)
        partial.join(stripe, ends)
        self._open[key] = partial
        self._count[peer_id] += 1
        self._gate.opened(peer_id, partial)
        try:
            await partial.wait()
        finally:
            partial.fail(Unreachable("this node ends"))  # unless it is complete
            self._gate.closed(peer_id, partial)
            del self._open[key]
            self._count[peer_id] -= 1
            self._count += Counter()  # drops what is not positive
        if partial.error is not None:
            raise partial.error
        return partial.protocol, join_stripes([partial.ends[index] for index in range(STRIPES)])

    def _checked(self, frame: Frame) -> wire.Stripe:
        try:
            stripe = wire.Stripe.FromString(frame.header)
        except DecodeError as error:
            raise PeerMisbehaved("a stream of several must begin with a Stripe") from error
        if frame.kind is not FrameKind.MESSAGE or frame.body or len(stripe.conversation) != _CONVERSATION_ID_BYTES:
            raise PeerMisbehaved("a stream of several must begin with a Stripe")
        if stripe.protocol not in self._protocols:
            raise PeerMisbehaved("conversations over several streams must be in a protocol that they are for")
        return stripe
