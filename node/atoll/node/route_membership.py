"""This node's stage of a route: joined to its neighbours under every plan that has one, until the session ends.

A route that a new plan leaves as it is goes on; any other change begins it anew.
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
    """At most one bridge at a time."""

    def __init__(
        self, network: Network, spec: RunSpec, peer_id: str, clock: Clock, on_broken: Callable[[], None] = lambda: None
    ) -> None:
        """`on_broken` is called when a neighbour is missing."""
        self.place: RoutePlace | None = None
        self.number: int | None = None  # of the route, in the plan that is followed
        self._stage_socket: StageSocket | None = None
        self._network, self._spec, self._me, self._clock, self._on_broken = network, spec, peer_id, clock, on_broken
        self._dispatcher = RouteDispatcher(network)
        self._bridge: RouteConnection | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def incarnations(self) -> int:
        """How often the route began under its name."""
        return self._bridge.incarnations if self._bridge is not None else 0

    @property
    def unreachable_neighbour(self) -> str:
        """Peer id of the neighbour that is out of reach; empty: none is."""
        return self._bridge.unreachable_neighbour if self._bridge is not None else ""

    async def follow(self, plan: Plan, trainer: Trainer) -> None:
        """Take the place that `plan` has for this node, if it has one. Raises `InvalidRequest`, `ChildDied`."""
        place, stage_socket = RoutePlace.of(plan, self._me), trainer.stage_socket
        goes_on = place is not None and (place, stage_socket) == (self.place, self._stage_socket)
        if not goes_on or self._running is None or self._running.done():
            await self.leave()
        if place is None or stage_socket is None:
            return
        number = plan.routes.index(place.peers)
        if self._running is None:
            await trainer.enter_route(place)
            self._begin(place, stage_socket, trainer)
        self.number = number

    def _begin(self, place: RoutePlace, stage_socket: StageSocket, trainer: Trainer) -> None:
        self.place, self._stage_socket = place, stage_socket
        self._bridge = RouteConnection(
            self._dispatcher, stage_socket, place, self._spec, trainer.facts.layers, self._clock, self._on_broken
        )
        self._running = asyncio.create_task(
            self._run(self._bridge, self._link_codec_choice(place, stage_socket, trainer))
        )

    def _link_codec_choice(self, place: RoutePlace, stage_socket: StageSocket, trainer: Trainer) -> LinkCodecs | None:
        if self._spec.pipeline.codec != "auto":
            return None
        channel = LinkFormat.of(self._spec, trainer.facts.layers, *place.route_key)
        tokens = channel.samples * channel.tokens
        return LinkCodecs(
            stage_socket,
            place,
            tokens * channel.dimension,
            lambda: tokens * trainer.status.busy_seconds_per_token,
            self._network.bytes_per_second_to,
        )

    async def _run(self, bridge: RouteConnection, codes: LinkCodecs | None) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                if codes is not None:
                    tasks.create_task(codes.run())
                await bridge.run()
        except* ChildDied:  # whoever has the trainer hears of it first
            pass

    async def until_driver_leaves(self, timeout: timedelta) -> None:
        """Where this is a later stage of a route: wait until it breaks, because the first one may still need it."""
        if self.place is None or self.place.stage == 0 or self._bridge is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                await self._bridge.until_broken()

    async def leave(self) -> None:
        """Let go of the neighbours. What was under way counts nothing."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self.place = self.number = self._stage_socket = self._bridge = self._running = None
