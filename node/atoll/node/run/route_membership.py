"""This node's stage of a route: connected to its neighbours while the plan gives it one, until the session ends.

A route that a new plan does not change keeps running. Any change restarts the route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from atoll.core.clock import Clock
from atoll.core.errors import ChildDied
from atoll.core.plan import Plan
from atoll.core.run_spec import RunSpec
from atoll.node.pipeline.dispatcher import RouteDispatcher
from atoll.node.pipeline.link_codec import LinkCodecs
from atoll.node.pipeline.message_codec import LinkFormat
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.route_connection import RouteConnection
from atoll.node.pipeline.stage_socket import StageSocket
from atoll.node.trainer.trainer import Trainer
from atoll.node.wire.transport import Network


class RouteMembership:
    """Keeps at most one route connection at a time."""

    def __init__(
        self, network: Network, spec: RunSpec, peer_id: str, clock: Clock, on_broken: Callable[[], None] = lambda: None
    ) -> None:
        """`on_broken` is called when a neighbour is out of reach."""
        self.place: RoutePlace | None = None
        self.route_index: int | None = None  # index of the route in the plan that is followed
        self._socket: StageSocket | None = None
        self._network, self._spec, self._me, self._clock, self._on_broken = network, spec, peer_id, clock, on_broken
        self._dispatcher = RouteDispatcher(network)
        self._connection: RouteConnection | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def incarnations(self) -> int:
        """Number of times the route started under its name."""
        return self._connection.incarnations if self._connection is not None else 0

    @property
    def unreachable_neighbour(self) -> str:
        """Peer id of the neighbour that is out of reach; empty if none is."""
        return self._connection.unreachable_neighbour if self._connection is not None else ""

    async def follow(self, plan: Plan, trainer: Trainer) -> None:
        """Take the place that `plan` gives this node on a route, if any. Raises `InvalidRequest`, `ChildDied`."""
        place, socket = RoutePlace.of(plan, self._me), trainer.stage_socket
        unchanged = place is not None and (place, socket) == (self.place, self._socket)
        if not unchanged or self._running is None or self._running.done():
            await self.leave()
        if place is None or socket is None:
            return
        route_index = plan.routes.index(place.peers)
        if self._running is None:
            await trainer.enter_route(place)
            self._begin(place, socket, trainer)
        self.route_index = route_index

    def _begin(self, place: RoutePlace, socket: StageSocket, trainer: Trainer) -> None:
        self.place, self._socket = place, socket
        self._connection = RouteConnection(
            self._dispatcher, socket, place, self._spec, trainer.facts.layers, self._clock, self._on_broken
        )
        self._running = asyncio.create_task(
            self._run(self._connection, self._link_codec_choice(place, socket, trainer))
        )

    def _link_codec_choice(self, place: RoutePlace, socket: StageSocket, trainer: Trainer) -> LinkCodecs | None:
        if self._spec.pipeline.codec != "auto":
            return None
        channel = LinkFormat.of(self._spec, trainer.facts.layers, *place.route_key)
        tokens = channel.samples * channel.tokens
        return LinkCodecs(
            socket,
            place,
            tokens * channel.dimension,
            lambda: tokens * trainer.status.busy_seconds_per_token,
            self._network.bytes_per_second_to,
        )

    async def _run(self, connection: RouteConnection, codecs: LinkCodecs | None) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                if codecs is not None:
                    tasks.create_task(codecs.run())
                await connection.run()
        except* ChildDied:  # the session detects the trainer's death itself
            pass

    async def until_driver_leaves(self, timeout: timedelta) -> None:
        """On a stage that is not the first: wait until the route breaks.

        The driver may still need this stage until then.
        """
        if self.place is None or self.place.stage == 0 or self._connection is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                await self._connection.until_broken()

    async def leave(self) -> None:
        """Disconnect from the neighbours and discard the current flush."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self.place = self.route_index = self._socket = self._connection = self._running = None
