"""The server of `/atoll/corpus/1`: this node's parts of the training text, for other members.

`block_client` is the other side. The gate admits only members; the owner's limits of traffic apply to what is sent. A
member gets verified bytes or the answer that this node lacks them (`block_files`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core.errors import Busy, NotFound, PeerMisbehaved, Unreachable
from atoll.core.frames import FrameKind
from atoll.node.data.block_files import BlockFiles
from atoll.node.data.corpus_table import MAX_RANGE_BYTES
from atoll.node.wire.peer_slots import PeerSlots
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp

PROTOCOL = "/atoll/corpus/1"
STREAMS_PER_PEER = 4
ANSWERS_AT_ONCE = 32  # including those that wait
SENT_AT_ONCE = 4  # each of usually 64 KiB, at most 4 MiB, in memory; rounds share the line with them
_WAIT_SECONDS = 5.0  # for one of these slots, and as long again for the disk
_SEND_SECONDS = 5.0  # for an answer, plus the time that its bytes take at this rate:
_SLOWEST_BYTES_PER_SECOND = 50_000
_REST_OF_SLOW_SECONDS = 60.0  # for a member that did not take an answer in time
_MAX_SLOW = 1024
IDLE_TIMEOUT = timedelta(seconds=30)
# before an answer that this node lacks something: it costs the asker nothing, but this node may have read a chunk
ABSENCE_PAUSE = timedelta(milliseconds=20)


class BlockServer:
    """Answers other members' requests for training text."""

    def __init__(self, network: Network, run_id: str, files: BlockFiles, may_share: Callable[[], bool]) -> None:
        """`may_share`: whether the owner allows this node to send training text now."""
        self.bytes_sent = 0
        self._run_id, self._files, self._may_share = run_id, files, may_share
        self._streams = PeerSlots[str](STREAMS_PER_PEER)
        self._answers = PeerSlots[str](STREAMS_PER_PEER, ANSWERS_AT_ONCE)
        self._turns: dict[str, asyncio.Lock] = {}  # one answer at a time to each member
        self._sending = asyncio.Semaphore(SENT_AT_ONCE)  # first come, first served
        self._slow_until = OrderedDict[str, float]()
        network.handle(PROTOCOL, self._handle)

    async def _handle(self, stream: Stream) -> None:
        with self._streams.hold(stream.peer_id, "streams for training text"):
            while True:
                try:
                    frame = await stream.receive(IDLE_TIMEOUT)
                except Unreachable:
                    return  # the peer closed the stream or was idle for too long
                if frame.kind is not FrameKind.MESSAGE:
                    raise PeerMisbehaved("a request for training text is not a message")
                await self._answer(stream, frame.header)

    async def _answer(self, stream: Stream, header: bytes) -> None:
        try:
            request = dp.CorpusRequest.FromString(header)
        except DecodeError as error:
            raise PeerMisbehaved("a request for training text does not parse") from error
        if request.run_id != self._run_id:
            raise NotFound(f"this node is in run {self._run_id!r}; the request is for another run")
        if request.stop and not 0 < request.stop - request.start <= MAX_RANGE_BYTES:
            raise PeerMisbehaved(f"a request for training text asks for more than {MAX_RANGE_BYTES >> 20} MiB")
        if not self._may_share():
            raise Busy("this node's owner paused it; ask another member")
        if self._slow_until.get(stream.peer_id, 0.0) > asyncio.get_running_loop().time():
            raise Busy("your line took an answer of this node too slowly; ask another member")
        if not self._answers.try_take(stream.peer_id):
            raise Busy("too many requests for training text wait at this node; ask another member")
        turn = self._turns.setdefault(stream.peer_id, asyncio.Lock())
        try:
            await self._answer_in_turn(stream, request, turn)
        finally:
            self._answers.release(stream.peer_id)
            if not self._answers.in_use(stream.peer_id):
                del self._turns[stream.peer_id]

    async def _answer_in_turn(self, stream: Stream, request: dp.CorpusRequest, turn: asyncio.Lock) -> None:
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    await held.enter_async_context(turn)
                    await held.enter_async_context(self._sending)
            except TimeoutError as error:
                raise Busy("this node's line is full; ask another member") from error
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    found = await self._find(request)
            except TimeoutError as error:
                raise Busy("this node's disk is slow; ask another member") from error
            await self._send(stream, found)

    async def _find(self, request: dp.CorpusRequest) -> tuple[bytes, int] | None:
        """Return the bytes, and the size of the file (0 for a range); None if this node lacks them."""
        if not request.stop:
            return await self._files.in_thread(self._files.read_piece, request.path, request.start)
        data = await self._files.in_thread(self._files.read, request.path, request.start, request.stop)
        return (data, 0) if data is not None else None

    async def _send(self, stream: Stream, found: tuple[bytes, int] | None) -> None:
        """Send an answer. Raises `Unreachable` for a member that takes it too slowly."""
        if found is None:
            await asyncio.sleep(ABSENCE_PAUSE.total_seconds())
        body, file_bytes = found or (b"", 0)
        try:
            async with asyncio.timeout(_SEND_SECONDS + len(body) / _SLOWEST_BYTES_PER_SECOND):
                reply = dp.CorpusReply(body_bytes=len(body), file_bytes=file_bytes)
                await stream.send(FrameKind.MESSAGE, reply.SerializeToString())
                if body:
                    await stream.send(FrameKind.BODY, b"", body)
        except TimeoutError as error:
            self._slow_until[stream.peer_id] = asyncio.get_running_loop().time() + _REST_OF_SLOW_SECONDS
            while len(self._slow_until) > _MAX_SLOW:
                self._slow_until.popitem(last=False)
            raise Unreachable(f"peer {stream.peer_id} takes training text too slowly") from error
        self.bytes_sent += len(body)
