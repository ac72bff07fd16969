"""StreamAcceptor: takes incoming streams from p2pd; each passes the gate before a handler runs.

p2pd connects to this node's stream socket and names the peer (as the libp2p handshake proved it) and the protocol. A
member's stream gets one empty frame, the accept. Any other stream gets a refusal and is closed unread. The dialler
waits for that frame before it sends. So a refusal is never lost behind its data, and the dialler learns at once when
this node has lost its table and it must say hello again. (On a direct connection that has just proved to work, streams
that average do not wait: `direct/stream.py`. Their data stays unread until they have passed the gate.)

The stripes of one stream (`stripes.py`) each pass the gate before their first frame is read. They are accepted
together, as one stream. Streams on direct connections are served here, too (`admit_and_serve`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path

from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
from hivemind.proto import p2pd_pb2 as p2pd

from atoll.core import log
from atoll.core.errors import AtollError, DeadlineExceeded, PeerMisbehaved, Unreachable
from atoll.core.frames import MAX_FRAME_BYTES, FrameKind
from atoll.node.direct import protocol as direct
from atoll.node.swarm import hello, stripes
from atoll.node.swarm.p2pd_control import CONTROL_TIMEOUT, STREAM_BUFFER_BYTES
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.wire.gate import Gate
from atoll.node.wire.peer_slots import PeerSlots
from atoll.node.wire.refusals import refusal_header, run_handler
from atoll.node.wire.streams import ByteReader, ByteWriter, SocketStream
from atoll.node.wire.traffic import Traffic
from atoll.node.wire.transport import Handler

MAX_REQUEST_BYTES = {
    "/atoll/round/1": 1 << 20,
    "/atoll/state/1": 1 << 16,
    "/atoll/corpus/1": 1 << 10,
    direct.PROTOCOL: 1 << 8,
    stripes.PROTOCOL: stripes.MAX_STRIPE_BYTES,
    "/atoll/probe/1": 1 << 6,
}
MAX_STREAMS_PER_PEER = 64  # a direct connection counts as one
MAX_STREAMS_PER_PROTOCOL = 6  # of one peer: unfinished frames on all of them stay below 64 MiB
MAX_OPENING_PER_PEER = stripes.MAX_PARTIAL_PER_PEER * stripes.STRIPES  # only one small frame is read on each
MAX_LINGERING, MAX_LINGERING_PER_PEER = 256, 8  # refused streams that are read for a second longer

_log = log.get("swarm")


def max_request_bytes(protocol: str) -> int:
    """Return the largest frame that a dialler may send in `protocol`."""
    return MAX_REQUEST_BYTES.get(protocol, MAX_FRAME_BYTES)


class StreamAcceptor:
    """The server on this node's stream socket, with the table of handlers."""

    def __init__(self, gate: Gate, introductions: hello.Introductions, traffic: Traffic) -> None:
        self.crashes = 0  # handlers that raised another exception than `AtollError`
        self.refused: Counter[str] = Counter()  # refused streams, by reason
        self._gate = gate
        self._introductions = introductions
        self._traffic = traffic
        self._handlers: dict[str, Handler] = {}
        self._active_streams = PeerSlots[tuple[str, str]](MAX_STREAMS_PER_PROTOCOL)  # by peer and protocol
        self._assembler = stripes.StripeAssembler(gate, direct.BULK_PROTOCOLS)
        self._opening_stripes = PeerSlots[str](MAX_OPENING_PER_PEER)  # stripes of streams that are not complete
        self._lingering = PeerSlots[str](MAX_LINGERING_PER_PEER, MAX_LINGERING)  # refused streams that are still read
        self._tasks = BackgroundTasks()
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Start to accept streams on the unix socket `path`."""
        self._server = await asyncio.start_unix_server(self._accept, path, limit=STREAM_BUFFER_BYTES)

    def handle(self, protocol: str, handler: Handler) -> None:
        """Run `handler` for each stream of `protocol` that a member opens."""
        self._handlers[protocol] = handler

    async def close(self) -> None:
        """Stop listening and cancel every handler."""
        if self._server is not None:
            self._server.close()
        await self._tasks.stop()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.begin(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = p2pd.StreamInfo()
        belongs_here = True
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT.total_seconds()):
                await read_pbmsg_safe(reader, info)
            peer_id: str = PeerID(info.peer).to_base58()
            if info.proto == hello.PROTOCOL:
                await self._introductions.answer(peer_id, reader, writer, info.addr)
            elif info.proto == stripes.PROTOCOL:
                belongs_here = await self._serve_stripe(peer_id, reader, writer)
            else:
                await self.admit_and_serve(self._stream(peer_id, info.proto, reader, writer))
        except (OSError, EOFError, TimeoutError) as error:
            _log.debug("stream lost before accept", error=str(error))
        finally:
            if belongs_here:
                writer.transport.abort()  # usually closed already

    async def admit_and_serve(self, stream: SocketStream) -> None:
        """Serve a stream from a peer, over libp2p or a direct connection, to its end; or refuse it."""
        peer_id, protocol = stream.peer_id, stream.protocol
        try:
            self._take_slot(peer_id, protocol)
        except AtollError as error:
            await self._refuse(stream, error)
            return
        self.abort_on_eviction(stream)
        try:
            with suppress(Unreachable):
                await stream.send(FrameKind.MESSAGE, b"")
                await run_handler(protocol, stream, self._handlers[protocol], self._count_crash)
            await stream.close()
        finally:
            self._active_streams.release((peer_id, protocol))

    async def _serve_stripe(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Take one stripe. The task of the first stripe serves the whole stream.

        Returns True when this stripe can be closed, False if another task serves the stream that it belongs to.
        """
        stream = self._stream(peer_id, stripes.PROTOCOL, reader, writer)
        try:
            whole = await self._assemble(stream, (reader, writer))
        except AtollError as error:
            if isinstance(error, DeadlineExceeded) or not isinstance(error, Unreachable):  # the peer still listens
                await self._refuse_after_reading(stream, error)
            return True
        if whole is None:
            return False
        protocol, ends = whole
        striped = self._stream(peer_id, protocol, *ends)
        try:
            await self.admit_and_serve(striped)
        finally:
            striped.abort()
        return True

    async def _assemble(
        self, stream: SocketStream, ends: stripes.ReaderWriter
    ) -> tuple[str, stripes.StripedReaderWriter] | None:
        """Check the gate, read the stripe's first frame, and return the result of `StripeAssembler.add`."""
        peer_id = stream.peer_id
        self._gate.require(peer_id)
        with self._opening_stripes.hold(peer_id, "stripes of incomplete streams"):
            first = await stream.receive(stripes.ASSEMBLE_TIMEOUT)
            self._gate.require(peer_id)
            return await self._assembler.add(peer_id, first, ends)

    def abort_on_eviction(self, stream: SocketStream) -> None:
        """Make the gate abort `stream` when its peer is evicted."""
        self._gate.track_stream(stream.peer_id, stream)
        stream.on_close(lambda: self._gate.untrack_stream(stream.peer_id, stream))

    def _take_slot(self, peer_id: str, protocol: str) -> None:
        """Check that the peer may open this stream, and take a slot of `_active_streams`. Raises `AtollError`."""
        self._gate.require(peer_id)
        if protocol not in self._handlers:
            raise Unreachable(f"{protocol} is not served on this node")
        if self._gate.open_streams(peer_id) >= MAX_STREAMS_PER_PEER:
            raise PeerMisbehaved(f"a peer has at most {MAX_STREAMS_PER_PEER} streams at once")
        self._active_streams.take((peer_id, protocol), f"streams of {protocol}")

    async def _refuse(self, stream: SocketStream, error: AtollError) -> None:
        self._count_refusal(stream, error)
        await stream.refuse_and_close(refusal_header(error))

    async def _refuse_after_reading(self, stream: SocketStream, error: AtollError) -> None:
        """Refuse a peer that has already sent data: read for another second, unless too many refused streams do."""
        if not self._lingering.try_take(stream.peer_id):
            await self._refuse(stream, error)
            return
        self._count_refusal(stream, error)
        try:
            await stream.refuse_after_reading(refusal_header(error))
        finally:
            self._lingering.release(stream.peer_id)

    def _count_refusal(self, stream: SocketStream, error: AtollError) -> None:
        self.refused[error.reason] += 1
        _log.info("stream refused", protocol=stream.protocol, peer=stream.peer_id, reason=error.reason)

    def _stream(self, peer_id: str, protocol: str, reader: ByteReader, writer: ByteWriter) -> SocketStream:
        return SocketStream(
            peer_id,
            protocol,
            reader,
            writer,
            require_member=lambda: self._gate.require(peer_id),
            traffic=self._traffic,
            max_frame_bytes=max_request_bytes(protocol),
        )

    def _count_crash(self) -> None:
        self.crashes += 1
