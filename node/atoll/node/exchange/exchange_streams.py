"""The streams of one exchange: counts their bytes, ends them with it, and records members that broke a rule."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

from atoll.core import log
from atoll.core.errors import PeerMisbehaved
from atoll.core.frames import FrameKind
from atoll.core.round_id import RoundId
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp

PROTOCOL = "/atoll/average/1"

_log = log.get("exchange")


class ExchangeStreams:
    """The streams that this node opens and those that it serves."""

    def __init__(self, round_id: RoundId, network: Network) -> None:
        self.round_id = round_id
        self.me = network.peer_id
        self.faults: dict[str, str] = {}  # peer → description of the rule
        self._network = network
        self._serving: set[asyncio.Task[None]] = set()
        self._closing = BackgroundTasks()
        self._open: list[Stream] = []
        self._bytes_sent = 0  # on closed streams

    @property
    def bytes_sent(self) -> int:
        """Socket bytes that this node has sent so far."""
        return self._bytes_sent + sum(stream.bytes_sent for stream in self._open)

    async def open(self, peer: str, timeout: timedelta) -> Stream:
        """Open a stream to a member; `track` it, and send a `header` first."""
        return await self._network.open(peer, PROTOCOL, timeout)

    def header(self, **wanted: Any) -> bytes:
        """Return the first message of a stream: the round, and what this node requests (`wanted`)."""
        return dp.ExchangeHeader(round=self.round_id.to_proto(), **wanted).SerializeToString()

    @asynccontextmanager
    async def request(self, peer: str, timeout: timedelta, **wanted: Any) -> AsyncIterator[Stream]:
        """Send a request for something of the round to a member."""
        stream = await self.open(peer, timeout)
        with self.track(stream):
            await stream.send(FrameKind.MESSAGE, self.header(**wanted))
            yield stream

    @contextmanager
    def track(self, stream: Stream) -> Iterator[None]:
        """Count the bytes of a stream that this node opened, then close it in the background: its peer may be dead."""
        self._open.append(stream)
        try:
            yield
        finally:
            self._forget(stream)
            self._closing.begin(stream.close())

    async def serve(self, stream: Stream, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on a stream that a member opened, until it finishes or the exchange ends."""
        task = asyncio.create_task(work)
        self._serving.add(task)
        self._open.append(stream)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._serving.discard(task)
            self._forget(stream)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, PeerMisbehaved):
            self.fault(stream.peer_id, str(error))
        if error is not None:
            raise error

    def end(self) -> None:
        """Stop serving members."""
        for task in self._serving:
            task.cancel()

    def fault(self, peer: str, reason: str) -> None:
        """Log a broken rule, and keep the first one of each member."""
        self.faults.setdefault(peer, reason)
        _log.warning("peer misbehaved", peer=peer, reason=reason)

    def misbehaved(self, peer: str, reason: str) -> PeerMisbehaved:
        """Record the broken rule, and return the error for the member."""
        self.fault(peer, reason)
        return PeerMisbehaved(reason)

    def _forget(self, stream: Stream) -> None:
        self._open.remove(stream)
        self._bytes_sent += stream.bytes_sent
