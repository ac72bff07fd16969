"""Warm connections to members that we dial, and patience with those that cannot be dialled.

A connection is made where a conversation needs one and none is free, and kept for the next. To make one, the peer is
asked over libp2p for a way in, and every host that is known of it is tried at once; the first that shows the right
certificate is shown the ticket. A peer that cannot be had so is not tried again for a while, longer each time.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, FrameInvalid, Rejected, Unreachable
from atoll.node.direct import tls
from atoll.node.direct.protocol import MAX_HOSTS
from atoll.node.direct.stream import Connection, DirectStream
from atoll.node.direct.wire import Wire, dial

DIAL_TIMEOUT = timedelta(seconds=3)  # TCP and TLS
ASK_TIMEOUT = timedelta(seconds=5)  # for the way in
PATIENCE = timedelta(seconds=1.5)  # an opener waits so long for a new connection; it is kept when it comes later
WARM_TIMEOUT = timedelta(seconds=5)  # for a kept connection to let us in
IDLE_TIMEOUT = timedelta(minutes=5)
MAX_CONNECTIONS_PER_PEER = 6
FIRST_PAUSE, LAST_PAUSE = timedelta(seconds=30), timedelta(minutes=10)

_log = log.get("direct")


@dataclass(frozen=True)
class WayIn:
    """What a peer offered, checked."""

    hosts: tuple[str, ...]
    port: int
    certificate_sha256: bytes
    ticket: bytes


AskWayIn = Callable[[str, timedelta], Awaitable[WayIn]]
Adopt = Callable[[str, Wire], Connection]


class Dialler:
    """The connections that we made, by peer."""

    def __init__(self, ask: AskWayIn, adopt: Adopt, clock: Clock) -> None:
        self._ask = ask
        self._adopt = adopt
        self._clock = clock
        self._context = tls.dialling_context()
        self._all: defaultdict[str, set[Connection]] = defaultdict(set)
        self._free: defaultdict[str, list[tuple[Connection, asyncio.TimerHandle]]] = defaultdict(list)
        self._dialling: defaultdict[str, set[asyncio.Task[None]]] = defaultdict(set)
        self._failures: dict[str, tuple[int, float]] = {}  # how many in a row, and when to try again
        self._tasks: set[asyncio.Task[None]] = set()

    def connected(self) -> frozenset[str]:
        """Peers with an open connection."""
        return frozenset(peer for peer, made in self._all.items() if any(one.is_open for one in made))

    async def open(self, peer_id: str, protocol: str, timeout: timedelta) -> DirectStream | None:
        """A conversation, or None when there is none to be had this way now. Raises what the peer refuses with."""
        while (connection := self._take(peer_id)) is not None:
            with suppress(Unreachable, FrameInvalid):
                return await self._begin(connection, protocol, min(timeout, WARM_TIMEOUT))
        if not self._may_dial(peer_id):
            return None
        dialling = self._start(self._dial(peer_id))
        self._dialling[peer_id].add(dialling)
        dialling.add_done_callback(lambda task: self._dialled(peer_id, task))
        await asyncio.wait({dialling}, timeout=min(timeout / 2, PATIENCE).total_seconds())
        connection = self._take(peer_id)
        if connection is not None:
            with suppress(Unreachable, FrameInvalid):
                return await self._begin(connection, protocol, min(timeout, WARM_TIMEOUT))
        return None

    async def close(self) -> None:
        """Dial nobody any more; what is connected is left to its owner."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for free in self._free.values():
            for _, timer in free:
                timer.cancel()

    def lost(self, connection: Connection) -> None:
        """The connection is gone."""
        peer_id = connection.peer_id
        self._all[peer_id].discard(connection)
        for kept in [kept for kept in self._free[peer_id] if kept[0] is connection]:
            kept[1].cancel()
            self._free[peer_id].remove(kept)
        for table in (self._all, self._free):
            if not table[peer_id]:
                del table[peer_id]

    # --- connections that are there ------------------------------------------------------------------

    async def _begin(self, connection: Connection, protocol: str, timeout: timedelta) -> DirectStream:
        return await connection.begin(protocol, timeout, lambda stream: self._ended(connection, stream))

    def _ended(self, connection: Connection, stream: DirectStream) -> None:
        if connection.is_open:
            self._start(self._settle(connection, stream))

    async def _settle(self, connection: Connection, stream: DirectStream) -> None:
        if await stream.until_ended():
            self._keep(connection)

    def _keep(self, connection: Connection) -> None:
        timer = asyncio.get_running_loop().call_later(IDLE_TIMEOUT.total_seconds(), connection.abort)
        self._free[connection.peer_id].append((connection, timer))

    def _take(self, peer_id: str) -> Connection | None:
        """The one that was used last: its window is the widest."""
        while kept := self._free.get(peer_id):
            connection, timer = kept.pop()
            timer.cancel()
            if connection.is_open:
                return connection
            connection.abort()
        return None

    # --- new ones --------------------------------------------------------------------------------------

    def _may_dial(self, peer_id: str) -> bool:
        count = len(self._all.get(peer_id, ())) + len(self._dialling.get(peer_id, ()))
        _, not_before = self._failures.get(peer_id, (0, 0.0))
        return count < MAX_CONNECTIONS_PER_PEER and self._clock.monotonic() >= not_before

    async def _dial(self, peer_id: str) -> None:
        try:
            way = await self._ask(peer_id, ASK_TIMEOUT)
            wire = await self._first(way)
        except (AtollError, OSError, TimeoutError) as error:
            self._failed(peer_id, error)
            return
        try:
            connection = self._adopt(peer_id, wire)
            self._all[peer_id].add(connection)
            await connection.show(way.ticket)
        except Rejected:  # it was banned meanwhile; the connection is closed or unknown to the gate
            wire[1].transport.abort()
            return
        except AtollError as error:
            wire[1].transport.abort()
            self._failed(peer_id, error)
            return
        self._failures.pop(peer_id, None)
        self._keep(connection)

    async def _first(self, way: WayIn) -> Wire:
        """The first host that shows the right certificate. Raises `Unreachable`."""
        addresses = await _resolve(way.hosts, way.port)
        tasks = [asyncio.create_task(self._pinned(address, way.certificate_sha256)) for address in addresses]
        chosen: Wire | None = None
        why = "it named no host"
        try:
            for finished in asyncio.as_completed(tasks):
                try:
                    chosen = await finished
                    return chosen
                except (Unreachable, OSError, TimeoutError) as error:
                    why = str(error) or type(error).__name__
        finally:
            for task in tasks:
                task.cancel()
            for wire in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(wire, BaseException) and wire is not chosen:
                    wire[1].transport.abort()
        raise Unreachable(f"none of {', '.join(way.hosts) or 'no hosts'} lets us in on port {way.port}: {why}")

    async def _pinned(self, address: tuple[str, int], certificate_sha256: bytes) -> Wire:
        wire = await dial(address, self._context, DIAL_TIMEOUT)
        tls_object: ssl.SSLObject = wire[1].get_extra_info("ssl_object")
        if not tls.is_pinned(tls_object, certificate_sha256):
            wire[1].transport.abort()
            raise Unreachable(f"{address[0]} shows another certificate")
        return wire

    def _failed(self, peer_id: str, error: BaseException) -> None:
        count, _ = self._failures.get(peer_id, (0, 0.0))
        pause = min(LAST_PAUSE, FIRST_PAUSE * 2 ** min(count, 10))
        self._failures[peer_id] = (count + 1, self._clock.monotonic() + pause.total_seconds())
        _log.info("no direct path", peer=peer_id, reason=str(error), again_in_seconds=pause.total_seconds())

    def _dialled(self, peer_id: str, task: asyncio.Task[None]) -> None:
        self._dialling[peer_id].discard(task)
        if not self._dialling[peer_id]:
            del self._dialling[peer_id]

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _resolve(hosts: Iterable[str], port: int) -> list[tuple[str, int]]:
    """IP addresses; a name that does not resolve is left out."""
    loop = asyncio.get_running_loop()
    found: dict[tuple[str, int], None] = {}
    for host in hosts:
        with suppress(OSError, TimeoutError, UnicodeError):
            async with asyncio.timeout(DIAL_TIMEOUT.total_seconds()):
                for *_, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    found.setdefault((str(address[0]), int(address[1])))
    return list(found)[:MAX_HOSTS]
