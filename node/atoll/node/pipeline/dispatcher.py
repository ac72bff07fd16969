"""Protocol handler for all routes of a node: passes an incoming stream to the route that its first header names.

A neighbour may start a route earlier than this node. A stream therefore waits up to `START_TIMEOUT` for its route.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Protocol

from atoll.core.errors import FrameInvalid, InvalidTransition
from atoll.core.frames import Frame, FrameKind
from atoll.node.pipeline.message_codec import parse_header
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import pipeline_pb2 as pb

PROTOCOL = "/atoll/pipeline/1"
FIRST_HEADER_TIMEOUT = timedelta(seconds=10)
START_TIMEOUT = timedelta(seconds=10)  # for a route, or its incarnation, to begin on this node

RouteKey = tuple[int, int]  # plan version, route


class RouteHandler(Protocol):
    """The node's end of one route: `RouteConnection`, or a fake in tests."""

    async def serve(self, stream: Stream, first: bytes, header: pb.StageMessage) -> None:
        """Forward the stream's messages until it ends. `first` is its first header, `header` the same one parsed."""
        ...


class RouteDispatcher:
    """Registers the protocol on one network and keeps the routes of this node."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._routes: dict[RouteKey, RouteHandler] = {}
        self._changed = asyncio.Condition()
        network.handle(PROTOCOL, self._serve)

    async def add(self, key: RouteKey, route: RouteHandler) -> None:
        """Pass streams of this route to `route` from now on. Raises `InvalidTransition` if the route has a handler."""
        if key in self._routes:
            raise InvalidTransition(f"this node is already a stage of route {key[1]} of plan {key[0]}")
        async with self._changed:
            self._routes[key] = route
            self._changed.notify_all()

    def remove(self, key: RouteKey) -> None:
        """Refuse streams of this route from now on."""
        del self._routes[key]

    async def _serve(self, stream: Stream) -> None:
        first = require_header(await stream.receive(FIRST_HEADER_TIMEOUT))
        header = parse_header(first)
        key = header.plan_version, header.route
        try:
            async with asyncio.timeout(START_TIMEOUT.total_seconds()), self._changed:
                await self._changed.wait_for(lambda: key in self._routes)
        except TimeoutError:
            raise InvalidTransition(f"this node is not a stage of route {key[1]} of plan {key[0]}") from None
        await self._routes[key].serve(stream, first, header)


def require_header(frame: Frame) -> bytes:
    """Return the header in a message's first frame. Raises `FrameInvalid`."""
    if frame.kind is not FrameKind.MESSAGE or frame.body:
        raise FrameInvalid("a stage message does not begin with a header frame")
    return frame.header
