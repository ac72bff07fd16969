"""Where p2pd hands over incoming streams: each passes the gate before any handler hears of it.

p2pd connects to our stream socket and names the peer (as the libp2p handshake proved it) and the protocol. A
member's stream is answered with one empty frame, "come in"; anybody else's with a refusal, and closed, without
reading. The dialler waits for that frame before it sends, so a refusal is never lost behind its data, and it
knows at once when our table was lost and it must say hello again. (Where a direct connection was proved a moment
ago, one that averages does not wait: `direct/stream.py`. What it sends lies unread until the gate was passed.)

Streams that carry one conversation together (`stripes.py`) each pass the gate before their first word is read, and are
let in as one.
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
from atoll.node.wire.gate import Gate
from atoll.node.wire.refusals import refusal_header, run_handler
from atoll.node.wire.streams import ByteReader, ByteWriter, SocketStream
from atoll.node.wire.traffic import Traffic
from atoll.node.wire.transport import Handler

MAX_REQUEST_BYTES = {
    "/atoll/round/1": 1 << 20,
    "/atoll/state/1": 1 << 16,
    direct.PROTOCOL: 1 << 8,
    stripes.PROTOCOL: stripes.MAX_STRIPE_BYTES,
    "/atoll/probe/1": 1 << 6,
}
MAX_STREAMS_PER_PEER = 64  # connections of the direct path count as one each
MAX_STREAMS_PER_PROTOCOL = 6  # of one peer: unfinished frames on all of them stay below 64 MiB
MAX_OPENING_PER_PEER = stripes.MAX_PARTIAL_PER_PEER * stripes.STRIPES  # nothing but a few words is read on them
MAX_LINGERING, MAX_LINGERING_PER_PEER = 256, 8  # refused streams that are read a moment longer

_log = log.get("swarm")


def max_request_bytes(protocol: str) -> int:
    """What a dialler may send in one frame there."""
    return MAX_REQUEST_BYTES.get(protocol, MAX_FRAME_BYTES)


class StreamAcceptor:
    """The server behind our stream socket and the table of handlers."""

    def __init__(self, gate: Gate, introductions: hello.Introductions, traffic: Traffic) -> None:
        self.crashes = 0  # handlers that raised something else than an `AtollError`
        self.refused: Counter[str] = Counter()  # streams turned away, by reason
        self._gate = gate
        self._introductions = introductions
        self._traffic = traffic
        self._handlers: dict[str, Handler] = {}
        self._active_streams: Counter[tuple[str, str]] = Counter()  # streams under way, by peer and protocol
        self._assembler = stripes.StripeAssembler(gate, direct.BULK_PROTOCOLS)
        self._opening: Counter[str] = Counter()  # streams of conversations of which some are missing, by peer
        self._lingering: Counter[str] = Counter()  # streams that were refused and are read a moment longer, by peer
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Start to take streams on the unix socket `path`."""
        self._server = await asyncio.start_unix_server(self._accept, path, limit=STREAM_BUFFER_BYTES)

    def handle(self, protocol: str, handler: Handler) -> None:
        """Run `handler` for members' streams of `protocol`."""
        self._handlers[protocol] = handler

    async def close(self) -> None:
        """Stop listening and end every handler."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = p2pd.StreamInfo()
        belongs_here = True
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT.total_seconds()):
                await read_pbmsg_safe(reader, info)
            peer_id: str = PeerID(info.peer).to_base58()
            if info.proto == hello.PROTOCOL:
                await self._introductions.answer(peer_id, reader, writer)
            elif info.proto == stripes.PROTOCOL:
                belongs_here = await self._serve_stripe(peer_id, reader, writer)
            else:
                await self.admit_and_serve(self._stream(peer_id, info.proto, reader, writer))
        except (OSError, EOFError, TimeoutError) as error:
            _log.debug("stream lost before it began", error=str(error))
        finally:
            if belongs_here:
                writer.transport.abort()  # closed already in the ordinary case

    async def admit_and_serve(self, stream: SocketStream) -> None:
        """Serve a stream that a member opened, by whichever path, to its end, or turn it away."""
        peer_id, protocol = stream.peer_id, stream.protocol
        try:
            self._check(peer_id, protocol)
        except AtollError as error:
            await self._refuse(stream, error)
            return
        self.abort_on_eviction(stream)
        self._active_streams[peer_id, protocol] += 1
        try:
            with suppress(Unreachable):
                await stream.send(FrameKind.MESSAGE, b"")
                await run_handler(protocol, stream, self._handlers[protocol], self._count_crash)
            await stream.close()
        finally:
            self._active_streams[peer_id, protocol] -= 1
            self._active_streams += Counter()  # drops what is not positive

    async def _serve_stripe(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One of the streams of a conversation: on the first that came, the conversation is served.

        Whether it is at its end; else it is part of a conversation that is served already.
        """
        stream = self._stream(peer_id, stripes.PROTOCOL, reader, writer)
        try:
            whole = await self._assemble(stream, (reader, writer))
        except AtollError as error:
            if isinstance(error, DeadlineExceeded) or not isinstance(error, Unreachable):  # it did not just hang up
                await self._refuse_after_reading(stream, error)
            return True
        if whole is None:
            return False
        protocol, ends = whole
        conversation = self._stream(peer_id, protocol, *ends)
        try:
            await self.admit_and_serve(conversation)
        finally:
            conversation.abort()
        return True

    async def _assemble(
        self, stream: SocketStream, ends: stripes.ReaderWriter
    ) -> tuple[str, stripes.StripedReaderWriter] | None:
        """As `StripeAssembler.add`, once it passed the gate and said what it belongs to."""
        peer_id = stream.peer_id
        self._opening[peer_id] += 1
        try:
            self._gate.require(peer_id)
            if self._opening[peer_id] > MAX_OPENING_PER_PEER:
                raise PeerMisbehaved(f"a peer opens at most {MAX_OPENING_PER_PEER} streams of conversations at once")
            first = await stream.receive(stripes.ASSEMBLE_TIMEOUT)
            self._gate.require(peer_id)
            return await self._assembler.add(peer_id, first, ends)
        finally:
            self._opening[peer_id] -= 1
            self._opening += Counter()  # drops what is not positive

    def abort_on_eviction(self, stream: SocketStream) -> None:
        """Have the gate close `stream` when its peer is evicted."""
        self._gate.opened(stream.peer_id, stream)
        stream.on_close(lambda: self._gate.closed(stream.peer_id, stream))

    def _check(self, peer_id: str, protocol: str) -> None:
        self._gate.require(peer_id)
        if protocol not in self._handlers:
            raise Unreachable(f"{protocol} is not served here")
        if self._gate.open_streams(peer_id) >= MAX_STREAMS_PER_PEER:
            raise PeerMisbehaved(f"a peer holds at most {MAX_STREAMS_PER_PEER} streams at once")
        if self._active_streams[peer_id, protocol] >= MAX_STREAMS_PER_PROTOCOL:
            raise PeerMisbehaved(f"a peer holds at most {MAX_STREAMS_PER_PROTOCOL} streams of {protocol} at once")

    async def _refuse(self, stream: SocketStream, error: AtollError) -> None:
        self._count_refusal(stream, error)
        await stream.refuse_and_close(refusal_header(error))

    async def _refuse_after_reading(self, stream: SocketStream, error: AtollError) -> None:
        """As `_refuse`, somebody who has sent a word by now."""
        peer_id = stream.peer_id
        if self._lingering.total() >= MAX_LINGERING or self._lingering[peer_id] >= MAX_LINGERING_PER_PEER:
            await self._refuse(stream, error)
            return
        self._count_refusal(stream, error)
        self._lingering[peer_id] += 1
        try:
            await stream.refuse_after_reading(refusal_header(error))
        finally:
            self._lingering[peer_id] -= 1
            self._lingering += Counter()  # drops what is not positive

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
