"""A stage on the network: carries messages between its runner and the other stages of its route.

Compute runs in a thread, one action at a time, while streams are read and written. One stream leads from each stage
to each that it sends to. When one breaks, a peer says what it may not, or the driver's patience ends, the member ends
with that error and its streams with it, so the whole route hears of it; its runner keeps what it has. Whoever owns
the member starts another with the same runner, on the same peers or with a replacement: the first thing that stages
say is the last verdict they know, so a stage that missed it steps or drops its flush then, and no micro-batch counts
for some layers only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch import Tensor

from atoll.core.errors import (
    DeadlineExceeded,
    FlushAborted,
    FrameInvalid,
    InvalidTransition,
    NotPermitted,
    PeerMisbehaved,
    Unreachable,
    first_error,
)
from atoll.core.frames import FrameKind
from atoll.node.averaging.codecs import CODECS, Codec
from atoll.node.pipeline.messages import Message
from atoll.node.pipeline.runner import Flushed, Runner
from atoll.node.pipeline.wire import Channel, pack, read_header, unpack
from atoll.node.transport import Network, Stream

PROTOCOL = "/atoll/pipeline/1"
BODY_BYTES = 4 << 20
_OPEN_TIMEOUT = timedelta(seconds=10)
_IDLE_TIMEOUT = timedelta(minutes=10)  # between two flushes, too

T = TypeVar("T")


class RouteMember:
    """One stage of a route, from `run` to the first thing that goes wrong."""

    def __init__(
        self, network: Network, peers: Sequence[str], runner: Runner, channel: Channel, codec: Codec = CODECS["int8"]
    ) -> None:
        """`peers` are the route's peer ids in the order of the stages. Of a runner's members one may run at a time."""
        runner.cut_off()
        self._network, self._peers, self._runner = network, tuple(peers), runner
        self._channel, self._codec = channel, codec
        self._turn = asyncio.Lock()  # of the runner: an action in a thread, or a message that comes
        self._news = asyncio.Event()  # something came since the runner last said that it waits
        self._acted = asyncio.Condition()
        self._outgoing: dict[int, asyncio.Queue[Message]] = {}
        self._serving: set[int] = set()
        self._broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        network.handle(PROTOCOL, self._serve)

    async def run(self) -> None:
        """Work until cancelled. Raises what broke the route: `Unreachable`, `PeerMisbehaved`, `DeadlineExceeded`, …"""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._greet()
                tasks.create_task(self._work())
                raise await asyncio.shield(self._broken)
        except BaseExceptionGroup as group:
            error = first_error(group)
            self._break(error if isinstance(error, Exception) else FlushAborted(str(error)))
            raise error from group
        finally:
            self._break(FlushAborted("the stage has left its route"))

    async def over(self, flush: int) -> None:
        """Return when a flush has ended on this stage; the driver's ends before the others'."""
        async with self._acted:
            await self._acted.wait_for(lambda: self._runner.ended >= flush)

    def _greet(self) -> None:
        place = self._runner.place
        for verdict in () if place.last else self._runner.verdicts:
            self._send(place.stage + 1, verdict)

    def _break(self, error: Exception) -> None:
        if not self._broken.done():
            self._broken.set_result(error)

    # --- the driver ---------------------------------------------------------------------------------

    async def flush(self, tokens: Sequence[Tensor], patience: timedelta) -> Flushed:
        """One optimiser step of the route over micro-batches of tokens [B, T+1].

        Raises `FlushAborted` when the route broke or took longer than `patience`: then it counts nothing, anywhere.
        """
        runner = self._runner
        async with self._turn:
            flush = runner.feed([(tokens_BT[:, :-1], tokens_BT[:, 1:]) for tokens_BT in tokens])
        self._news.set()
        trouble = await self._trouble_before_end(flush, patience)
        if trouble is not None:
            async with self._turn:
                self._give_up(flush)
        assert runner.finished is not None
        if runner.finished.verdict.aborted:
            raise FlushAborted(f"flush {flush} counts nothing: {trouble}", "its micro-batches come again") from trouble
        return runner.finished

    async def _trouble_before_end(self, flush: int, patience: timedelta) -> Exception | None:
        ended = asyncio.create_task(self.over(flush))
        try:
            async with asyncio.timeout(patience.total_seconds()):
                await asyncio.wait((ended, self._broken), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return DeadlineExceeded(f"the route took longer than {patience}")
        finally:
            ended.cancel()
        return None if self._runner.ended >= flush else self._broken.result()

    def _give_up(self, flush: int) -> None:
        """Abort, unless the verdict fell meanwhile: then this stage's own step is all that is left here."""
        with suppress(InvalidTransition):
            self._runner.abort()
        while self._runner.ended < flush:
            sent = self._runner.advance()
            if sent is None:  # a new member was made of this runner meanwhile, and forgot the flush
                raise FlushAborted(
                    f"flush {flush} counts nothing: its stage began anew", "its micro-batches come again"
                )
            for receiver, message in sent:
                self._send(receiver, message)

    # --- work ---------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            async with self._turn:
                self._news.clear()
                sent = await _in_thread(self._runner.advance)
                for receiver, message in sent or ():
                    self._send(receiver, message)
            async with self._acted:
                self._acted.notify_all()
            if sent is None:
                await self._news.wait()

    # --- streams ------------------------------------------------------------------------------------

    def _send(self, receiver: int, message: Message) -> None:
        if self._broken.done():
            return  # nobody would carry it; the next member begins with the verdict
        queue = self._outgoing.get(receiver)
        if queue is None:
            queue = self._outgoing[receiver] = asyncio.Queue()  # the schedule's credits bound it
            self._tasks.create_task(self._deliver(receiver, queue))
        queue.put_nowait(message)

    async def _deliver(self, receiver: int, queue: asyncio.Queue[Message]) -> None:
        stream = await self._network.open(self._peers[receiver], PROTOCOL, _OPEN_TIMEOUT)
        self._tasks.create_task(_watch(stream))
        try:
            while True:
                header, body = await asyncio.to_thread(pack, await queue.get(), self._channel, self._codec)
                await stream.send(FrameKind.MESSAGE, header.SerializeToString())
                for start in range(0, len(body), BODY_BYTES):
                    await stream.send(FrameKind.BODY, b"", memoryview(body)[start : start + BODY_BYTES])
        finally:
            await stream.close()

    async def _serve(self, stream: Stream) -> None:
        """Another stage's messages, until its stream ends, which breaks the route."""
        if stream.peer_id not in self._peers:
            raise NotPermitted(f"{stream.peer_id} is not on this route")
        sender = self._peers.index(stream.peer_id)
        if sender in self._serving:
            raise PeerMisbehaved(f"stage {sender} opened a second stream")
        self._serving.add(sender)
        try:
            while True:
                message = await self._receive(stream)
                async with self._turn:
                    if self._broken.done():
                        raise Unreachable("this stage has left the route, or begins anew")
                    self._runner.deliver(sender, message)
                self._news.set()
        except Exception as error:  # of whatever kind: the route is broken, and the peer is told
            self._break(error)
            raise
        finally:
            self._serving.discard(sender)

    async def _receive(self, stream: Stream) -> Message:
        frame = await stream.receive(_IDLE_TIMEOUT)
        if frame.kind is not FrameKind.MESSAGE or frame.body:
            raise FrameInvalid("a message between stages begins with its header")
        header = read_header(frame.header, self._channel)
        body = bytearray()
        while len(body) < header.body_bytes:
            part = await stream.receive(_IDLE_TIMEOUT)
            if part.kind is not FrameKind.BODY or not part.body or len(body) + len(part.body) > header.body_bytes:
                raise FrameInvalid("the body of a message between stages has another length than its header says")
            body += part.body
        return await asyncio.to_thread(unpack, header, body, self._channel)


async def _watch(stream: Stream) -> None:
    """Raise when the other side hangs up or refuses: it never answers on this protocol otherwise."""
    while True:
        with suppress(DeadlineExceeded):
            await stream.receive(_IDLE_TIMEOUT)
            raise PeerMisbehaved(f"peer {stream.peer_id} answered where nothing was asked")


async def _in_thread(work: Callable[[], T]) -> T:
    """Run it in a thread, and do not return before it is done even when cancelled: it has the runner till then."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.exception()  # retrieved: nobody is left to tell
        raise
