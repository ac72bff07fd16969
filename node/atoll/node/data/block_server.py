"""The server of `/atoll/corpus/1`: this node's parts of the training text, for other members.

`block_client` is the other side. The gate admits only members; the owner's limits of traffic apply to what is sent. A
member gets verified bytes or the word that they are not here (`block_files`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
ANSWERS_AT_ONCE = 32  # each of usually 64 KiB, at most 4 MiB, in memory
IDLE_TIMEOUT = timedelta(seconds=30)
# before the word that something is not here: it costs the asker nothing, and this node may have read and hashed a chunk
ABSENCE_PAUSE = timedelta(milliseconds=20)


class BlockServer:
    """Answers the requests of other members."""

    def __init__(self, network: Network, run_id: str, files: BlockFiles, may_share: Callable[[], bool]) -> None:
        """`may_share`: whether the owner lets this node give anything now."""
        self.bytes_sent = 0
        self._run_id, self._files, self._may_share = run_id, files, may_share
        self._streams = PeerSlots[str](STREAMS_PER_PEER)
        self._answers = PeerSlots[str](STREAMS_PER_PEER, ANSWERS_AT_ONCE)
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
        if not self._answers.try_take(stream.peer_id):
            raise Busy(f"this node sends training text to {ANSWERS_AT_ONCE} members now; ask another member")
        try:
            await self._send(stream, request)
        finally:
            self._answers.release(stream.peer_id)

    async def _send(self, stream: Stream, request: dp.CorpusRequest) -> None:
        found: tuple[bytes, int] | None
        if request.stop:
            data = await asyncio.to_thread(self._files.read, request.path, request.start, request.stop)
            found = (data, 0) if data is not None else None
        else:
            found = await asyncio.to_thread(self._files.read_piece, request.path, request.start)
        if found is None:
            await asyncio.sleep(ABSENCE_PAUSE.total_seconds())
            await stream.send(FrameKind.MESSAGE, dp.CorpusReply().SerializeToString())
            return
        reply = dp.CorpusReply(body_bytes=len(found[0]), file_bytes=found[1])
        await stream.send(FrameKind.MESSAGE, reply.SerializeToString())
        await stream.send(FrameKind.BODY, b"", found[0])
        self.bytes_sent += len(found[0])
