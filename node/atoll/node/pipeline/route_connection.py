"""A node's place on a route, in the swarm process: incarnation after incarnation, until it is cancelled.

The driver begins each one, under a number higher than all before; it passes downstream with the streams, and a stage
follows the stage before it. So however a route breaks and whoever is replaced, all of it begins anew together, and
streams of what was before are refused. Nothing here computes: messages pass between streams and trainer as they are.
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

_FIRST_PAUSE = timedelta(seconds=0.1)  # before the driver begins anew; twice as long each time that none works
_LONGEST_PAUSE = timedelta(seconds=1)  # who was started again is met so soon; a dial a second is no burden

_log = log.get("route")


class RouteConnection:
    """Joins one trainer that holds a span to its neighbours. The trainer knows its place (`Trainer.enter_route`)."""

    def __init__(
        self,
        dispatcher: RouteDispatcher,
        cable: StageSocket,
        route: RoutePlace,
        spec: RunSpec,
        layers: plan_pb2.LayerTable,
        clock: Clock,
        on_neighbour_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_neighbour_lost` is called when another neighbour is missing than before."""
        self.incarnations = 0  # begun
        self.last_error: AtollError | None = None  # why the last one ended
        self._dispatcher, self._cable, self._route = dispatcher, cable, route
        self._channel = LinkFormat.of(spec, layers, *route.name)
        self._place = StagePosition(route.stage, route.stages, bool(layers.layers[-1].tied_to), spec.pipeline.ahead)
        self._clock = clock
        self._links: StageStreams | None = None
        self._was_ready = False  # the incarnation before
        self._upstream_incarnation = 0  # an incarnation that the stage before has begun and we have not
        self._last = 0
        self._changed = asyncio.Condition()
        self._missing: int | None = None
        self._on_neighbour_lost = on_neighbour_lost

    @property
    def unreachable_neighbour(self) -> str:
        """Peer id of the neighbour that was out of reach when the route broke; empty: none, or it works again."""
        works = self._links is not None and (self._links.was_ready or self._place.last)
        return "" if works or self._missing is None else self._route.peers[self._missing]

    @property
    def incarnation(self) -> int:
        """The number of the one under way; 0: none is."""
        return self._links.number if self._links is not None else 0

    async def until_broken(self) -> None:
        """Return when the incarnation under way is over; at once where none is."""
        if self._links is not None:
            await self._links.until_broken()

    async def run(self) -> NoReturn:
        """Until cancelled. Raises `ChildDied` when the trainer is gone."""
        await self._dispatcher.add(self._route.name, self)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward_from_trainer())
                await self._run_incarnations()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._dispatcher.remove(self._route.name)

    async def serve(self, stream: Stream, first: bytes, header: pb.StageMessage) -> None:
        """A neighbour's stream, for as long as its incarnation lasts."""
        number, sender = header.incarnation, self._route.stage_of(stream.peer_id)
        if sender == self._route.stage - 1:
            await self._join_upstream_incarnation(number)
        try:
            async with asyncio.timeout(START_TIMEOUT.total_seconds()), self._changed:
                await self._changed.wait_for(lambda: self._links is not None and self._links.number >= number)
        except TimeoutError:
            raise InvalidTransition(f"incarnation {number} of the route has not begun here") from None
        links = self._links
        if links is None or links.number != number:
            raise InvalidTransition(f"incarnation {number} of the route is over here")
        await links.forward_incoming(stream, first)

    async def _forward_from_trainer(self) -> NoReturn:
        while True:
            frame = await self._cable.receive()
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
                if self._was_ready or str(error) != str(self.last_error):  # not every second while somebody is away
                    _log.info("route broke", route=self._route.route, stage=self._route.stage, reason=str(error))
                self.last_error = error
            if self._place.first:
                lasted = timedelta(seconds=self._clock.monotonic() - began) if self._was_ready else timedelta(0)
                pause = _FIRST_PAUSE if lasted > 2 * pause else min(2 * pause, _LONGEST_PAUSE)
                await asyncio.sleep(pause.total_seconds())

    async def _run_incarnation(self, number: int) -> NoReturn:
        channel = replace(self._channel, incarnation=number)
        links = StageStreams(self._dispatcher.network, self._route, self._place, channel, self._cable)
        self.incarnations += 1
        try:
            async with self._changed:
                self._links = links
                self._changed.notify_all()
            await links.run()  # its tasks can be joined by those who were woken: nothing runs in between
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
        """The stage before is at this incarnation."""
        if number <= max(self._upstream_incarnation, self._links.number if self._links is not None else 0):
            return
        self._upstream_incarnation = number
        if self._links is not None:
            self._links.break_off(FlushAborted("the route begins anew"))
        async with self._changed:
            self._changed.notify_all()


def _is_cancelled() -> bool:
    """Whether somebody cancelled this task while a group of tasks was ending with an error: the group hides it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
