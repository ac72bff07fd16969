"""The streams of one incarnation of a route, between the neighbours and this node's trainer.

One stream leads from each stage to each that it sends to. Frames are passed on as they are; what is looked at is the
header of each message: whether it is of this route and incarnation, whether this neighbour may say such a thing, and
how long its body must be, all before a byte of the body is read. Between messages a stream may be idle for as long as
it likes. When anything breaks, everything here ends, and the trainer and all neighbours are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from atoll.core.errors import (
    AtollError,
    DeadlineExceeded,
    FlushAborted,
    FrameInvalid,
    PeerMisbehaved,
    Unreachable,
    first_error,
)
from atoll.core.frames import Frame, FrameKind
from atoll.node.pipeline.dispatcher import PROTOCOL, require_header
from atoll.node.pipeline.inbox import StagePosition
from atoll.node.pipeline.message_codec import LinkFormat, message_class, read_header
from atoll.node.pipeline.messages import Ready
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.stage_socket import (
    WINDOW_FRAMES,
    FrameType,
    SocketFrame,
    StageSocket,
    decode_error,
    encode_error,
)
from atoll.node.wire.refusals import refusal_header
from atoll.node.wire.transport import Network, Stream

_OPEN_TIMEOUT = timedelta(seconds=10)
_CLOSE_TIMEOUT = timedelta(seconds=0.5)
_RECEIVE_TIMEOUT = timedelta(minutes=10)  # of an idleness without end


class StageStreams:
    """From `run` to the first thing that goes wrong."""

    def __init__(
        self, network: Network, route: RoutePlace, place: StagePosition, channel: LinkFormat, cable: StageSocket
    ) -> None:
        self.number = channel.incarnation
        self.was_ready = False  # whether the stages after this one said so
        self.unreachable_neighbour: int | None = None  # the stage that was out of reach, if that is what broke it
        self._network, self._route, self._place, self._channel, self._cable = network, route, place, channel, cable
        self._tasks = asyncio.TaskGroup()
        self._outgoing: dict[int, asyncio.Queue[SocketFrame]] = {}
        self._senders: set[int] = set()
        self._broken: asyncio.Future[AtollError] = asyncio.get_running_loop().create_future()

    async def run(self) -> NoReturn:
        """Raises what broke the route; whatever it is, the trainer is told last."""
        try:
            async with self._tasks:
                self._cable.send_nowait(FrameType.ATTACH, 0, self.number)
                try:
                    raise await asyncio.shield(self._broken)
                finally:  # before the group waits for its tasks: nobody may start another one then
                    self.break_off(FlushAborted("this stage has left its route"))
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._cable.send_nowait(FrameType.DETACH, 0, self.number, encode_error(self._broken.result()))

    async def until_broken(self) -> None:
        """Return when it has ended, for whatever reason."""
        await asyncio.wait({self._broken})

    def break_off(self, error: AtollError) -> None:
        """End, for this reason. The first one counts."""
        if not self._broken.done():
            self._broken.set_result(error)

    def _start(self, work: Coroutine[Any, Any, NoReturn], stage: int) -> asyncio.Task[NoReturn]:
        """One of the tasks that live as long as the incarnation, a neighbour's; its error ends it."""

        async def guarded() -> NoReturn:
            try:
                await work
            except Exception as error:
                if isinstance(error, Unreachable) and not self._broken.done():
                    self.unreachable_neighbour = stage
                self.break_off(error if isinstance(error, AtollError) else FlushAborted(f"a stage crashed: {error!r}"))
                raise

        task = self._tasks.create_task(guarded())
        task.add_done_callback(lambda _: work.close())  # cancelled before it began, it would never be awaited
        return task

    # --- in -----------------------------------------------------------------------------------------

    async def forward_incoming(self, stream: Stream, first: bytes) -> None:
        """Pass a neighbour's messages on, until the incarnation ends; then raise why, for the neighbour to hear."""
        sender = self._route.stage_of(stream.peer_id)
        if self._broken.done():
            raise await asyncio.shield(self._broken)
        if sender in self._senders:
            raise PeerMisbehaved(f"stage {sender} opened a second stream")
        self._senders.add(sender)
        carrying = self._start(self._carry(sender, stream, first), sender)
        try:
            await asyncio.wait({carrying})
        except asyncio.CancelledError:
            self.break_off(Unreachable(f"stage {sender} was cut off"))
            raise
        if not carrying.cancelled() and (error := carrying.exception()) is not None:
            raise error
        raise FlushAborted(f"the route broke: {await asyncio.shield(self._broken)}")

    async def _carry(self, sender: int, stream: Stream, first: bytes) -> NoReturn:
        data = first
        while True:
            left = self._checked(sender, data)
            await self._cable.send(FrameType.HEADER, sender, self.number, data)
            while left:
                part = await _receive_without_deadline(stream)
                if part.kind is not FrameKind.BODY or not 0 < len(part.body) <= left:
                    raise FrameInvalid("the body of a message between stages has another length than its header says")
                await self._cable.send(FrameType.BODY, sender, self.number, part.body)
                left -= len(part.body)
            data = require_header(await _receive_without_deadline(stream))

    def _checked(self, sender: int, data: bytes) -> int:
        """Bytes of the body. Raises `PeerMisbehaved`."""
        header = read_header(data, self._channel)
        kind = message_class(header)
        if self._place.sender_of(kind) != sender:
            raise PeerMisbehaved(f"stage {sender} sent {kind.__name__}, which is another one's to say")
        self.was_ready |= kind is Ready
        return header.body_bytes

    # --- out ----------------------------------------------------------------------------------------

    def forward_outgoing(self, frame: SocketFrame) -> None:
        """A frame of the trainer's; those of other incarnations are dropped."""
        if frame.incarnation != self.number or self._broken.done():
            return
        if frame.word is FrameType.BREAK:
            self.break_off(decode_error(frame.payload))
            return
        if frame.stage not in self._outgoing:
            self._outgoing[frame.stage] = asyncio.Queue(WINDOW_FRAMES)
            self._start(self._deliver(frame.stage), frame.stage)
        self._outgoing[frame.stage].put_nowait(frame)

    async def _deliver(self, receiver: int) -> NoReturn:
        stream = await self._network.open(self._route.peers[receiver], PROTOCOL, _OPEN_TIMEOUT)
        watching = self._start(_watch(stream), receiver)
        try:
            while True:
                frame = await self._outgoing[receiver].get()
                if frame.word is FrameType.HEADER:
                    await stream.send(FrameKind.MESSAGE, frame.payload)
                else:
                    await stream.send(FrameKind.BODY, b"", frame.payload)
                await self._cable.send(FrameType.SENT, receiver, self.number)
        finally:
            watching.cancel()
            await self._close_with_reason(stream)

    async def _close_with_reason(self, stream: Stream) -> None:
        """Say why, if the other side listens."""
        if self._broken.done():
            with suppress(AtollError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT.total_seconds()):
                    await stream.send(FrameKind.REFUSAL, refusal_header(self._broken.result()))
        await stream.close()


async def _receive_without_deadline(stream: Stream) -> Frame:
    while True:
        with suppress(DeadlineExceeded):
            return await stream.receive(_RECEIVE_TIMEOUT)


async def _watch(stream: Stream) -> NoReturn:
    """Raise when the other side hangs up or refuses: it never answers on this protocol otherwise."""
    await _receive_without_deadline(stream)
    raise PeerMisbehaved(f"peer {stream.peer_id} answered where nothing was asked")
