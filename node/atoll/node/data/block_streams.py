"""Streams of `/atoll/corpus/1` to other members: few to each, reused, and closed when they are idle."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core.errors import DeadlineExceeded, PeerMisbehaved, Unreachable
from atoll.core.frames import FrameKind
from atoll.node.data.block_server import PROTOCOL
from atoll.node.data.corpus_table import PIECE_BYTES
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp

STREAMS_TO_PEER = 2  # of the six direct connections to a member; rounds use the others
_OPEN_TIMEOUT = timedelta(seconds=10)
_ANSWER_TIMEOUT = timedelta(seconds=10)  # until the answer begins; a member lets a request wait for 5 s
_BODY_SECONDS = 5.0  # plus the time that the bytes take at this rate:
_SLOWEST_BYTES_PER_SECOND = 50_000
_IDLE_SECONDS = 5.0  # less than the server's


class BlockStreams:
    """Asks members for ranges, one request at a time on each stream."""

    def __init__(self, network: Network, run_id: str) -> None:
        self._network, self._run_id = network, run_id
        self._idle: dict[str, list[tuple[Stream, float]]] = {}  # by peer, with the time of the last answer
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()
        self._sweeping: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks()

    async def ask(self, peer: str, path: str, start: int, stop: int) -> tuple[bytes, int] | None:
        """Return unverified bytes and the size of the file; None if the member does not have them.

        `stop` = 0: a piece of a file of unknown size. The size is 0 otherwise. Raises `Unreachable`, `Rejected`,
        `PeerMisbehaved`, `Busy`. The caller holds a slot.
        """
        request = dp.CorpusRequest(run_id=self._run_id, path=path, start=start, stop=stop)
        stream = self._take_idle(peer)
        if stream is not None:
            try:
                return await self._exchange(stream, request)
            except DeadlineExceeded:  # the member would not answer on another stream either
                raise
            except Unreachable:  # the member closed the stream while it was idle
                pass
        return await self._exchange(await self._network.open(peer, PROTOCOL, _OPEN_TIMEOUT), request)

    async def close(self) -> None:
        """Close all streams."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        idle, self._idle = self._idle, {}
        await asyncio.gather(*(stream.close() for streams in idle.values() for stream, _ in streams))
        await self._tasks.stop()

    async def _exchange(self, stream: Stream, request: dp.CorpusRequest) -> tuple[bytes, int] | None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT.total_seconds()):
                await stream.send(FrameKind.MESSAGE, request.SerializeToString())
            answer = await self._receive(stream, request)
        except TimeoutError as error:
            self._tasks.begin(stream.close())
            raise DeadlineExceeded(f"peer {stream.peer_id} did not take a request in time") from error
        except BaseException:
            self._tasks.begin(stream.close())
            raise
        self._keep(stream)
        return answer

    async def _receive(self, stream: Stream, request: dp.CorpusRequest) -> tuple[bytes, int] | None:
        frame = await stream.receive(_ANSWER_TIMEOUT)
        try:
            reply = dp.CorpusReply.FromString(frame.header)
        except DecodeError as error:
            raise PeerMisbehaved(f"peer {stream.peer_id} sent a reply that does not parse") from error
        if frame.kind is not FrameKind.MESSAGE or len(frame.body):
            raise PeerMisbehaved(f"peer {stream.peer_id} sent a {frame.kind.name} frame where a MESSAGE was due")
        if not reply.body_bytes:
            return None
        wanted = request.stop - request.start if request.stop else PIECE_BYTES
        fits = reply.body_bytes == wanted if request.stop else reply.body_bytes <= wanted
        if not fits:
            raise PeerMisbehaved(f"peer {stream.peer_id} announced {reply.body_bytes} bytes instead of {wanted}")
        body = await stream.receive(timedelta(seconds=_BODY_SECONDS + reply.body_bytes / _SLOWEST_BYTES_PER_SECOND))
        if body.kind is not FrameKind.BODY or len(body.body) != reply.body_bytes:
            raise PeerMisbehaved(f"peer {stream.peer_id} sent {len(body.body)} bytes instead of {reply.body_bytes}")
        return bytes(body.body), reply.file_bytes

    @asynccontextmanager
    async def slot(self, peer: str, seconds: float | None) -> AsyncIterator[bool]:
        """Hold one of a few stream slots of a member; yields False if none becomes free within `seconds`."""
        semaphore = self._slots.setdefault(peer, asyncio.Semaphore(STREAMS_TO_PEER))
        self._users[peer] += 1
        taken = False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    taken = await semaphore.acquire()
            yield taken
        finally:
            if taken:
                semaphore.release()
            self._users[peer] -= 1
            if not self._users[peer]:
                del self._users[peer], self._slots[peer]

    def _take_idle(self, peer: str) -> Stream | None:
        streams = self._idle.get(peer)
        if not streams:
            return None
        stream, _ = streams.pop()
        if not streams:
            del self._idle[peer]
        return stream

    def _keep(self, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        self._idle.setdefault(stream.peer_id, []).append((stream, loop.time()))
        if self._sweeping is None:
            self._sweeping = loop.call_later(_IDLE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        too_old, kept = loop.time() - _IDLE_SECONDS, dict[str, list[tuple[Stream, float]]]()
        for peer, streams in self._idle.items():
            for stream, answered_at in streams:
                if answered_at > too_old:
                    kept.setdefault(peer, []).append((stream, answered_at))
                else:
                    self._tasks.begin(stream.close())
        self._idle = kept
        self._sweeping = loop.call_later(_IDLE_SECONDS / 2, self._sweep) if kept else None
