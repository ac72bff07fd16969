"""The streams of one incarnation of a route, between this node's trainer and the neighbours.

Each stage opens one stream to each stage that it sends to. Frames are forwarded unchanged. Only the header of each
message is checked, before a byte of its body is read: route, incarnation, right of the neighbour to send this kind, and
length of the body. Streams may be idle between messages for any time. On the first error all streams end, and the
trainer and all neighbours get the reason.
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
_RECEIVE_TIMEOUT = timedelta(minutes=10)  # repeated without end, since a stream may be idle for any time


class StageStreams:
    """All streams of an incarnation, from `run` to the first error."""

    def __init__(
        self,
        network: Network,
        route: RoutePlace,
        place: StagePosition,
        link_format: LinkFormat,
        stage_socket: StageSocket,
    ) -> None:
        self.number = link_format.incarnation
        self.was_ready = False  # the stages after this one reported `Ready`
        self.unreachable_neighbour: int | None = None  # stage whose unreachability ended the incarnation
        self._network, self._route, self._place, self._link_format, self._stage_socket = (
            network,
            route,
            place,
            link_format,
            stage_socket,
        )
        self._tasks = asyncio.TaskGroup()
        self._outgoing: dict[int, asyncio.Queue[SocketFrame]] = {}
        self._senders: set[int] = set()
        self._broken: asyncio.Future[AtollError] = asyncio.get_running_loop().create_future()

    async def run(self) -> NoReturn:
        """Forward frames until the first error, and raise it. The trainer receives the reason."""
        try:
            async with self._tasks:
                self._stage_socket.send_nowait(FrameType.ATTACH, 0, self.number)
                try:
                    raise await asyncio.shield(self._broken)
                finally:  # while the group waits for its tasks, no new one may start
                    self.break_off(FlushAborted("this stage has left its route"))
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._stage_socket.send_nowait(FrameType.DETACH, 0, self.number, encode_error(self._broken.result()))

    async def until_broken(self) -> None:
        """Return when the incarnation has ended, for any reason."""
        await asyncio.wait({self._broken})

    def break_off(self, error: AtollError) -> None:
        """End the incarnation with this error. The first error counts."""
        if not self._broken.done():
            self._broken.set_result(error)

    def _start(self, work: Coroutine[Any, Any, NoReturn], stage: int) -> asyncio.Task[NoReturn]:
        """Start a neighbour's task, which lives as long as the incarnation. Its error ends the incarnation."""

        async def guarded() -> NoReturn:
            try:
                await work
            except Exception as error:
                if isinstance(error, Unreachable) and not self._broken.done():
                    self.unreachable_neighbour = stage
                self.break_off(error if isinstance(error, AtollError) else FlushAborted(f"a stage crashed: {error!r}"))
                raise

        task = self._tasks.create_task(guarded())
        task.add_done_callback(lambda _: work.close())  # a task cancelled before it ran never awaits `work`
        return task

    # --- in -----------------------------------------------------------------------------------------

    async def forward_incoming(self, stream: Stream, first: bytes) -> None:
        """Forward a neighbour's messages to the trainer. At the end, raise the reason for the neighbour."""
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
            self.break_off(Unreachable(f"the stream of stage {sender} was cut off"))
            raise
        if not carrying.cancelled() and (error := carrying.exception()) is not None:
            raise error
        raise FlushAborted(f"the route broke: {await asyncio.shield(self._broken)}")

    async def _carry(self, sender: int, stream: Stream, first: bytes) -> NoReturn:
        data = first
        while True:
            left = self._checked(sender, data)
            await self._stage_socket.send(FrameType.HEADER, sender, self.number, data)
            while left:
                part = await _receive_without_deadline(stream)
                if part.kind is not FrameKind.BODY or not 0 < len(part.body) <= left:
                    raise FrameInvalid(
                        f"stage {sender} sent a {part.kind.name} frame of {len(part.body)} bytes; its header leaves a "
                        f"body of 1 to {left} bytes"
                    )
                await self._stage_socket.send(FrameType.BODY, sender, self.number, part.body)
                left -= len(part.body)
            data = require_header(await _receive_without_deadline(stream))

    def _checked(self, sender: int, data: bytes) -> int:
        """Check a header. Returns the length of its body in bytes. Raises `PeerMisbehaved`."""
        header = read_header(data, self._link_format)
        kind = message_class(header)
        if self._place.sender_of(kind) != sender:
            raise PeerMisbehaved(f"stage {sender} may not send {kind.__name__} to stage {self._place.stage}")
        self.was_ready |= kind is Ready
        return header.body_bytes

    # --- out ----------------------------------------------------------------------------------------

    def forward_outgoing(self, frame: SocketFrame) -> None:
        """Forward a frame of the trainer. Drops frames of other incarnations."""
        if frame.incarnation != self.number or self._broken.done():
            return
        if frame.type is FrameType.BREAK:
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
                if frame.type is FrameType.HEADER:
                    await stream.send(FrameKind.MESSAGE, frame.payload)
                else:
                    await stream.send(FrameKind.BODY, b"", frame.payload)
                await self._stage_socket.send(FrameType.SENT, receiver, self.number)
        finally:
            watching.cancel()
            await self._close_with_reason(stream)

    async def _close_with_reason(self, stream: Stream) -> None:
        """Send the reason why the incarnation ended, if any, and close the stream."""
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
    """Raise when the other side closes the stream or refuses it. It sends nothing else on this stream."""
    await _receive_without_deadline(stream)
    raise PeerMisbehaved(f"peer {stream.peer_id} sent data on a one-way stream")
