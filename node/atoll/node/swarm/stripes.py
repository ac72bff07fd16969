"""One conversation over several libp2p streams at once: its bytes go out on one after another, a little on each.

    bytes        0 … 64 Ki   → stream 0
              64 Ki … 128 Ki → stream 1     …     then 0 again; in both directions

All streams between two peers share one connection, and each has a window of its own, which yamux lets grow. But when
it doubles, the sender is told of half of what the receiver grants (go-yamux 4.0.1, `sendWindowUpdate`: what the first
`GrowTo` adds is in no message), so that from then on it may send hardly more than one update's worth, and has nothing
to send until the next: a stream stands still for about a round trip in five. Several wait one after another, and the
connection is busy all the time (EVIDENCE §7: 0.76 of a link with one, 0.95 with four).

The dialler opens all of them, is let in on each like on any other stream, and says on each what it belongs to. The
acceptor begins to serve when the last of them is there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core.errors import DeadlineExceeded, PeerMisbehaved, first_error
from atoll.core.frames import Buffer, Frame, FrameKind
from atoll.node.swarm.streams import ByteReader, ByteTransport, ByteWriter
from atoll.node.transport import Stream
from atoll.v1 import dataplane_pb2 as wire

PROTOCOL = "/atoll/stripes/1"
STRIPES = 4
UNIT_BYTES = 64 * 1024  # on one stream before it is the next one's turn; a fresh window has four of them
GATHER_TIMEOUT = timedelta(seconds=5)  # from the first stream of a conversation to the last
MAX_GATHERING_PER_PEER = 6  # conversations of which some streams are missing
MAX_STRIPE_BYTES = 256  # of a `Stripe`
_NAME_BYTES = 16

Ends = tuple[ByteReader, ByteWriter]


class StripedReader:
    """The bytes of several readers in the order in which the other side dealt them."""

    def __init__(self, readers: Sequence[ByteReader]) -> None:
        self._readers = readers
        self._at = 0  # bytes read
        self._found: bytearray | None = None  # of a read under way
        self._filled = 0  # bytes of it

    async def readexactly(self, n: int, /) -> Buffer:
        """The next `n` bytes. Raises `IncompleteReadError` at the end, and whatever a stream broke with.

        One that is cancelled must be asked for again, as long: what came is kept.
        """
        if self._found is None:
            self._found = bytearray(n)
        if len(self._found) != n:
            raise RuntimeError("another read was given up before, and must be asked for again")
        while self._filled < n:
            turn, used = divmod(self._at, UNIT_BYTES)
            count = min(n - self._filled, UNIT_BYTES - used)
            piece = await self._readers[turn % len(self._readers)].readexactly(count)
            self._found[self._filled : self._filled + count] = piece
            self._filled += count
            self._at += count
        found, self._found, self._filled = self._found, None, 0
        return found


class StripedWriter:
    """Deals bytes to several writers; its own transport, too."""

    def __init__(self, writers: Sequence[ByteWriter]) -> None:
        self._writers = writers
        self._at = 0  # bytes written

    @property
    def transport(self) -> ByteTransport:
        return self

    def write(self, data: Buffer, /) -> None:
        view = memoryview(data)
        while view:
            turn, used = divmod(self._at, UNIT_BYTES)
            piece, view = view[: UNIT_BYTES - used], view[UNIT_BYTES - used :]
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

    def set_write_buffer_limits(self, high: int) -> None:
        for writer in self._writers:
            writer.transport.set_write_buffer_limits(high)

    def get_write_buffer_size(self) -> int:
        return sum(writer.transport.get_write_buffer_size() for writer in self._writers)


def together(ends: Sequence[Ends]) -> Ends:
    """One reader and one writer of the streams of a conversation, in their order."""
    return StripedReader([reader for reader, _ in ends]), StripedWriter([writer for _, writer in ends])


# --- the dialler's side ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entered:
    """A stream on which the peer let us in."""

    stream: Stream
    ends: Ends


async def open_stripes(enter: Callable[[], Awaitable[Entered]], protocol: str) -> Ends:
    """Enter several streams and say on each what it is part of. Raises what the first of them fails with."""
    tasks: list[asyncio.Task[Entered]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_enter(enter)) for _ in range(STRIPES)]
        entered = [task.result() for task in tasks]
        conversation = secrets.token_bytes(_NAME_BYTES)
        for index, one in enumerate(entered):
            stripe = wire.Stripe(conversation=conversation, index=index, protocol=protocol)
            await one.stream.send(FrameKind.MESSAGE, stripe.SerializeToString())
    except BaseException as error:
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().ends[1].transport.abort()
        if isinstance(error, ExceptionGroup):
            raise first_error(error) from error
        raise
    return together([one.ends for one in entered])


async def _enter(enter: Callable[[], Awaitable[Entered]]) -> Entered:
    return await enter()


# --- the acceptor's side ---------------------------------------------------------------------------------


@dataclass
class _Gathering:
    """A conversation of which streams are missing."""

    protocol: str
    whole: asyncio.Future[None]
    ends: dict[int, Ends] = field(default_factory=dict)  # by index


class Gatherings:
    """Members' streams that wait for the others of their conversation."""

    def __init__(self, protocols: Collection[str]) -> None:
        """`protocols`: what may be spoken so."""
        self._protocols = protocols
        self._open: dict[tuple[str, bytes], _Gathering] = {}  # by peer and conversation
        self._count: Counter[str] = Counter()  # of them, by peer

    async def add(self, peer_id: str, frame: Frame, ends: Ends) -> tuple[str, Ends] | None:
        """With the first stream of a conversation: its protocol and all of it, once the last came; else None.

        `frame` is the first on that stream. Raises `PeerMisbehaved`, and `DeadlineExceeded` when others do not come.
        """
        stripe = self._checked(frame)
        key = peer_id, stripe.conversation
        found = self._open.get(key)
        if found is not None:
            self._join(found, stripe, ends)
            return None
        if self._count[peer_id] >= MAX_GATHERING_PER_PEER:
            raise PeerMisbehaved("too many conversations wait for the rest of their streams")
        gathering = _Gathering(stripe.protocol, asyncio.get_running_loop().create_future())
        self._join(gathering, stripe, ends)
        self._open[key] = gathering
        self._count[peer_id] += 1
        try:
            async with asyncio.timeout(GATHER_TIMEOUT.total_seconds()):
                await gathering.whole
        except BaseException as error:
            for _, writer in gathering.ends.values():
                if writer is not ends[1]:
                    writer.transport.abort()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"{len(gathering.ends)} of {STRIPES} streams came") from error
            raise
        finally:
            del self._open[key]
            self._count[peer_id] -= 1
            self._count += Counter()  # drops what is not positive
        return gathering.protocol, together([gathering.ends[index] for index in range(STRIPES)])

    def _checked(self, frame: Frame) -> wire.Stripe:
        try:
            stripe = wire.Stripe.FromString(frame.header)
        except DecodeError as error:
            raise PeerMisbehaved("a stream of several must begin with a Stripe") from error
        if frame.kind is not FrameKind.MESSAGE or frame.body or len(stripe.conversation) != _NAME_BYTES:
            raise PeerMisbehaved("a stream of several must begin with a Stripe")
        if stripe.protocol not in self._protocols:
            raise PeerMisbehaved("conversations over several streams must be in a protocol that they are for")
        return stripe

    def _join(self, gathering: _Gathering, stripe: wire.Stripe, ends: Ends) -> None:
        if stripe.protocol != gathering.protocol or stripe.index >= STRIPES or stripe.index in gathering.ends:
            raise PeerMisbehaved("a stream does not fit into its conversation")
        gathering.ends[stripe.index] = ends
        if len(gathering.ends) == STRIPES and not gathering.whole.done():
            gathering.whole.set_result(None)
