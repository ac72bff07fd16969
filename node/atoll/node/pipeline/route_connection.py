"""The daemon's end of a route: connects the trainer to its neighbours, one incarnation of the route after another.

The driver starts each incarnation, with a higher number than all earlier ones. The number passes downstream with the
streams, and each stage follows the previous stage. So after any failure or replacement of a stage, the whole route
restarts together. Streams of earlier incarnations are refused. Nothing here computes: messages pass between the streams
(`StageStreams`) and the trainer (`StageSocket`) unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

from atoll.core import log
from atoll.core.clock import Clock, unix_ms
from atoll.core.errors import AtollError, ChildDied, FlushAborted, InvalidTransition, first_error
from atoll.core.run_spec import RunSpec
from atoll.node.pipeline.dispatcher import START_TIMEOUT, RouteDispatcher
from atoll.node.pipeline.inbox import StagePosition
from atoll.node.pipeline.message_codec import LinkFormat
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.stage_socket import StageSocket
from atoll.node.pipeline.stage_streams import StageStreams
from atoll.node.wire.transport import Stream
from atoll.v1 import pipeline_pb2 as pb
from atoll.v1 import plan_pb2

_FIRST_PAUSE = timedelta(seconds=0.1)  # before the driver's next incarnation; doubles after each failure
# short, so that a restarted stage is reached soon; one dial per second costs little
_LONGEST_PAUSE = timedelta(seconds=1)

_log = log.get("route")


class RouteConnection:
    """Connects one trainer with a span to its neighbours. `Trainer.enter_route` must have set its place."""

    def __init__(
        self,
        dispatcher: RouteDispatcher,
        stage_socket: StageSocket,
        route: RoutePlace,
        spec: RunSpec,
        layers: plan_pb2.LayerTable,
        clock: Clock,
        on_neighbour_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_neighbour_lost` is called when an incarnation ends because a different neighbour is unreachable."""
        self.incarnations = 0  # incarnations started on this node
        self.last_error: AtollError | None = None  # why the last incarnation ended
        self._dispatcher, self._stage_socket, self._route = dispatcher, stage_socket, route
        self._link_format = LinkFormat.of(spec, layers, *route.route_key)
        self._place = StagePosition(route.stage, route.stages, bool(layers.layers[-1].tied_to), spec.pipeline.ahead)
        self._clock = clock
        self._links: StageStreams | None = None
        self._was_ready = False  # whether the previous incarnation was ready
        self._upstream_incarnation = 0  # started by the previous stage and not yet by this one; 0: none
        self._last = 0  # number of the newest incarnation on this node
        self._changed = asyncio.Condition()
        self._missing: int | None = None
        self._on_neighbour_lost = on_neighbour_lost

    @property
    def unreachable_neighbour(self) -> str:
        """Peer id of the neighbour that was unreachable when the route broke; empty if none, or if the route works."""
        works = self._links is not None and (self._links.was_ready or self._place.last)
        return "" if works or self._missing is None else self._route.peers[self._missing]

    @property
    def incarnation(self) -> int:
        """Number of the current incarnation; 0 if there is none."""
        return self._links.number if self._links is not None else 0

    async def until_broken(self) -> None:
        """Return when the current incarnation ends; at once if there is none."""
        if self._links is not None:
            await self._links.until_broken()

    async def run(self) -> NoReturn:
        """Run incarnations until cancelled. Raises `ChildDied` when the trainer has ended."""
        await self._dispatcher.add(self._route.route_key, self)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward_from_trainer())
                await self._run_incarnations()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._dispatcher.remove(self._route.route_key)

    async def serve(self, stream: Stream, first: bytes, header: pb.StageMessage) -> None:
        """Forward a neighbour's stream during its incarnation. Raises `InvalidTransition` for another incarnation."""
        number, sender = header.incarnation, self._route.stage_of(stream.peer_id)
        if sender == self._route.stage - 1:
            await self._join_upstream_incarnation(number)
        try:
            async with asyncio.timeout(START_TIMEOUT.total_seconds()), self._changed:
                await self._changed.wait_for(lambda: self._links is not None and self._links.number >= number)
        except TimeoutError:
            seconds = START_TIMEOUT.total_seconds()
            raise InvalidTransition(
                f"incarnation {number} of the route did not begin on this node within {seconds:.0f} s"
            ) from None
        links = self._links
        if links is None or links.number != number:
            raise InvalidTransition(f"incarnation {number} of the route is over on this node")
        await links.forward_incoming(stream, first)

    async def _forward_from_trainer(self) -> NoReturn:
        while True:
            frame = await self._stage_socket.receive()
            if self._links is not None:
                self._links.forward_outgoing(frame)

    async def _run_incarnations(self) -> NoReturn:
        pause = _FIRST_PAUSE
        while True:
            number = await self._next_number()
            began = self._clock.monotonic()
            try:
                await self._run_incarnation(number)
            except ChildDied:
                raise
            except AtollError as error:
                if _is_cancelled():
                    raise asyncio.CancelledError from error
                # no repeated line each second while a stage is down
                if self._was_ready or str(error) != str(self.last_error):
                    _log.info("route_disconnected", route=self._route.route, stage=self._route.stage, reason=str(error))
                self.last_error = error
            if self._place.first:
                lasted = timedelta(seconds=self._clock.monotonic() - began) if self._was_ready else timedelta(0)
                pause = _FIRST_PAUSE if lasted > 2 * pause else min(2 * pause, _LONGEST_PAUSE)
                await asyncio.sleep(pause.total_seconds())

    async def _run_incarnation(self, number: int) -> NoReturn:
        link_format = replace(self._link_format, incarnation=number)
        links = StageStreams(self._dispatcher.network, self._route, self._place, link_format, self._stage_socket)
        self.incarnations += 1
        try:
            async with self._changed:
                self._links = links
                self._changed.notify_all()
            await links.run()  # enters its task group before a woken `serve` runs: nothing is awaited in between
        finally:
            before, self._missing = self._missing, links.unreachable_neighbour
            self._links, self._was_ready = None, links.was_ready
            if self._missing not in (None, before):
                self._on_neighbour_lost()

    async def _next_number(self) -> int:
        if self._place.first:
            self._last = max(self._last + 1, unix_ms(self._clock))
        else:
            async with self._changed:
                await self._changed.wait_for(lambda: self._upstream_incarnation)
            self._last, self._upstream_incarnation = self._upstream_incarnation, 0
        return self._last

    async def _join_upstream_incarnation(self, number: int) -> None:
        """Follow the previous stage to its incarnation: end the current one here and start that one."""
        if number <= max(self._upstream_incarnation, self._links.number if self._links is not None else 0):
            return
        self._upstream_incarnation = number
        if self._links is not None:
            self._links.break_off(FlushAborted("the route begins anew"))
        async with self._changed:
            self._changed.notify_all()


def _is_cancelled() -> bool:
    """True if this task was cancelled while its task group ended with an error, which hides the cancellation."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
