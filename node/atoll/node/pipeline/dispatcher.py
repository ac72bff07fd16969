"""One handler for all routes on this node: an incoming stream goes to the bridge that its first header names.

A neighbour may be quicker than we are: a stream waits a while for a bridge that has not begun.
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
START_TIMEOUT = timedelta(seconds=10)  # for a bridge, or its incarnation, to begin

RouteKey = tuple[int, int]  # plan version, route


class RouteHandler(Protocol):
    """A bridge."""

    async def serve(self, stream: Stream, first: bytes, header: pb.StageMessage) -> None:
        """Carry the stream's messages, of which the first header was read, until it ends."""
        ...


class RouteDispatcher:
    """Serves the protocol on one network, for good."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._bridges: dict[RouteKey, RouteHandler] = {}
        self._changed = asyncio.Condition()
        network.handle(PROTOCOL, self._serve)

    async def add(self, name: RouteKey, bridge: RouteHandler) -> None:
        """From now on streams of that route are this bridge's. Raises `InvalidTransition` beside another one."""
        if name in self._bridges:
            raise InvalidTransition(f"this node stands on route {name[1]} of plan {name[0]} already")
        async with self._changed:
            self._bridges[name] = bridge
            self._changed.notify_all()

    def remove(self, name: RouteKey) -> None:
        """Streams of that route are refused."""
        del self._bridges[name]

    async def _serve(self, stream: Stream) -> None:
        first = require_header(await stream.receive(FIRST_HEADER_TIMEOUT))
        header = parse_header(first)
        name = header.plan_version, header.route
        try:
            async with asyncio.timeout(START_TIMEOUT.total_seconds()), self._changed:
                await self._changed.wait_for(lambda: name in self._bridges)
        except TimeoutError:
            raise InvalidTransition(f"this node does not stand on route {name[1]} of plan {name[0]}") from None
        await self._bridges[name].serve(stream, first, header)


def require_header(frame: Frame) -> bytes:
    """Of a message's first frame. Raises `FrameInvalid`."""
    if frame.kind is not FrameKind.MESSAGE or frame.body:
        raise FrameInvalid("a message between stages begins with its header")
    return frame.header
