"""Dialler: direct connections that this node makes, kept open for reuse, with a backoff for each peer.

A stream takes an idle connection, or else the dialler makes a new one. It asks the peer over libp2p for a direct offer,
then dials every known host of the peer at once. The first host that shows the right certificate receives the proof of
the ticket. A connection whose stream ended cleanly becomes idle and serves the next stream.

If no connection succeeds, or a stream breaks, the dialler does not dial that peer for a while. The pause doubles each
time, from 30 s to 10 min, until a stream ends cleanly. Meanwhile streams use libp2p.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, DeadlineExceeded, FrameInvalid, Rejected, Unreachable
from atoll.node.direct import tls
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.direct.hosts import is_ip_address
from atoll.node.direct.protocol import MAX_HOSTS
from atoll.node.direct.stream import Connection, DirectStream, RegisterConnection
from atoll.node.direct.tickets import proof
from atoll.node.direct.tls_streams import TlsStreams, dial
from atoll.node.system.background_tasks import BackgroundTasks

DIAL_TIMEOUT = timedelta(seconds=3)  # TCP and TLS
OFFER_TIMEOUT = timedelta(seconds=5)  # for the peer's direct offer
CONNECT_WAIT = timedelta(seconds=1.5)  # `open` waits this long for a new connection; a later one becomes idle
ACCEPT_TIMEOUT = timedelta(seconds=5)  # for the peer to accept a stream; at most half of the caller's timeout
IDLE_TIMEOUT = timedelta(minutes=5)
MAX_CONNECTIONS_PER_PEER = 6
OPTIMISTIC_WITHIN = timedelta(seconds=10)  # after a clean end, an optimistic stream does not wait for the accept
# concurrent name look-ups; if all names of one peer hang, another peer's can still be resolved
_LOOK_UPS = 2 * MAX_HOSTS
MIN_BACKOFF, MAX_BACKOFF = timedelta(seconds=30), timedelta(minutes=10)

_log = log.get("direct")


@dataclass(frozen=True)
class CheckedOffer:
    """A peer's direct offer after validation, with the hosts that this node knows for the peer."""

    hosts: tuple[str, ...]
    port: int
    certificate_sha256: bytes
    ticket: bytes


RequestOffer = Callable[[str, timedelta], Awaitable[CheckedOffer]]


class Dialler:
    """The direct connections that this node dialled, by peer."""

    def __init__(
        self,
        me: str,
        request_offer: RequestOffer,
        register: RegisterConnection,
        clock: Clock,
        *,
        policy: DialPolicy,
        optimistic: Collection[str],
    ) -> None:
        """`policy`: the hosts and ports that may be dialled. `optimistic`: protocols that need not await the accept."""
        self._me = me
        self._optimistic_protocols = optimistic
        self._policy = policy
        self._closed = False
        self._resolver = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="resolve")
        self._request_offer = request_offer
        self._register = register
        self._clock = clock
        self._context = tls.dialling_context()
        self._connections_by_peer: defaultdict[str, set[Connection]] = defaultdict(set)
        self._idle: defaultdict[str, list[tuple[Connection, asyncio.TimerHandle]]] = defaultdict(list)
        self._last_clean_end: dict[Connection, float] = {}  # monotonic time of the last clean end of a stream
        self._dialling: defaultdict[str, set[asyncio.Task[None]]] = defaultdict(set)
        self._failures: dict[str, tuple[int, float]] = {}  # failures in a row, monotonic time of the next attempt
        self._tasks = BackgroundTasks()

    def connected(self) -> frozenset[str]:
        """Peers with an open connection."""
        return frozenset(peer for peer, made in self._connections_by_peer.items() if any(one.is_open for one in made))

    async def open(self, peer_id: str, protocol: str, timeout: timedelta) -> DirectStream | None:
        """Open a stream on a direct connection, or return None if none is available. Raises the peer's refusal."""
        share = min(timeout / 2, ACCEPT_TIMEOUT)  # leave time for libp2p
        while (kept := self._pop_idle(peer_id)) is not None:
            try:
                return await self._begin(kept, protocol, share)
            except DeadlineExceeded as error:  # the other idle connections are probably dead as well
                self._drop_idle(peer_id, error)
                return None
            except (Unreachable, FrameInvalid):
                if kept.is_open:
                    raise  # the peer refused; the connection works
        if not self._may_dial(peer_id):
            return None
        dialling = self._tasks.begin(self._dial(peer_id))
        self._dialling[peer_id].add(dialling)
        dialling.add_done_callback(lambda task: self._dialled(peer_id, task))
        await asyncio.wait({dialling}, timeout=min(timeout / 2, CONNECT_WAIT).total_seconds())
        fresh = self._pop_idle(peer_id)
        if fresh is None:
            return None
        try:
            return await self._begin(fresh, protocol, share)
        except (Unreachable, FrameInvalid) as error:
            if fresh.is_open:
                raise
            self._drop_idle(peer_id, error)
            return None

    async def close(self) -> None:
        """Stop dialling. The caller closes the open connections."""
        self._closed = True
        await self._tasks.stop()
        for free in self._idle.values():
            for _, timer in free:
                timer.cancel()
        self._resolver.shutdown(wait=False, cancel_futures=True)

    def lost(self, connection: Connection) -> None:
        """Forget a connection that was lost."""
        peer_id = connection.peer_id
        self._connections_by_peer[peer_id].discard(connection)
        for kept in [kept for kept in self._idle[peer_id] if kept[0] is connection]:
            kept[1].cancel()
            self._idle[peer_id].remove(kept)
        for table in (self._connections_by_peer, self._idle):
            if not table[peer_id]:
                del table[peer_id]
        self._last_clean_end.pop(connection, None)

    # --- open connections ----------------------------------------------------------------------------

    async def _begin(self, connection: Connection, protocol: str, timeout: timedelta) -> DirectStream:
        proved = (
            self._clock.monotonic() - self._last_clean_end.get(connection, -math.inf)
            < OPTIMISTIC_WITHIN.total_seconds()
        )
        return await connection.begin(
            protocol,
            timeout,
            lambda stream: self._on_stream_ended(connection, stream),
            optimistic=proved and protocol in self._optimistic_protocols,
        )

    def _on_stream_ended(self, connection: Connection, stream: DirectStream) -> None:
        if stream.accept_timed_out or (stream.broken and stream.was_accepted):
            connection.abort()
            self._drop_idle(connection.peer_id, Unreachable("a stream broke or was never accepted"))
        elif connection.is_open and not self._closed:
            self._tasks.begin(self._reuse_when_ended(connection, stream))

    async def _reuse_when_ended(self, connection: Connection, stream: DirectStream) -> None:
        if await stream.wait_peer_ended():
            self._failures.pop(connection.peer_id, None)
            self._last_clean_end[connection] = self._clock.monotonic()
            self._keep(connection)

    def _drop_idle(self, peer_id: str, error: BaseException) -> None:
        """Close all idle connections of a peer, which are probably dead as well. The next streams use libp2p."""
        for connection, timer in self._idle.pop(peer_id, []):
            timer.cancel()
            connection.abort()
        self._failed(peer_id, error)

    def _keep(self, connection: Connection) -> None:
        timer = asyncio.get_running_loop().call_later(IDLE_TIMEOUT.total_seconds(), connection.abort)
        self._idle[connection.peer_id].append((connection, timer))

    def _pop_idle(self, peer_id: str) -> Connection | None:
        """Take the idle connection that was used last, because its congestion window is the widest."""
        while kept := self._idle.get(peer_id):
            connection, timer = kept.pop()
            timer.cancel()
            if connection.is_open:
                return connection
            connection.abort()
        return None

    # --- new connections -------------------------------------------------------------------------------

    def _may_dial(self, peer_id: str) -> bool:
        if self._closed:
            return False
        count = len(self._connections_by_peer.get(peer_id, ())) + len(self._dialling.get(peer_id, ()))
        _, not_before = self._failures.get(peer_id, (0, 0.0))
        return count < MAX_CONNECTIONS_PER_PEER and self._clock.monotonic() >= not_before

    async def _dial(self, peer_id: str) -> None:
        try:
            offer = await self._request_offer(peer_id, OFFER_TIMEOUT)
            tls_streams = await self._connect(peer_id, offer)
        except (AtollError, OSError, TimeoutError) as error:
            self._failed(peer_id, error)
            return
        try:
            connection = self._register(peer_id, tls_streams)
            self._connections_by_peer[peer_id].add(connection)
            await connection.send_proof(proof(offer.ticket, self._me, peer_id))
        except Rejected:  # the peer was banned; the connection is closed, or the gate does not know it
            tls_streams[1].transport.abort()
            return
        except AtollError as error:
            tls_streams[1].transport.abort()
            self._failed(peer_id, error)
            return
        self._keep(connection)

    async def _connect(self, peer_id: str, offer: CheckedOffer) -> TlsStreams:
        """Connect to a host that shows the right certificate, IP addresses before names. Raises `Unreachable`."""
        why = "none of them may be dialled"
        if not self._policy.allows_port(offer.port):
            raise Unreachable(f"peer {peer_id} offers port {offer.port}, which this node does not dial")
        for look_up in (self._literal, self._resolved):
            addresses = [(host, offer.port) for host in await look_up(offer.hosts)]
            try:
                if addresses:
                    return await self._connect_fastest(addresses, offer.certificate_sha256)
            except (Unreachable, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
        hosts = ", ".join(offer.hosts) or "none"
        raise Unreachable(
            f"no known address of peer {peer_id} ({hosts}) accepts connections on port {offer.port}: {why}"
        )

    async def _connect_fastest(self, addresses: Iterable[tuple[str, int]], certificate_sha256: bytes) -> TlsStreams:
        """Dial all addresses at once and return the first success. Raises the last error if all fail."""
        tasks = [asyncio.create_task(self._pinned(address, certificate_sha256)) for address in addresses]
        chosen: TlsStreams | None = None
        last: Exception | None = None
        try:
            for finished in asyncio.as_completed(tasks):
                try:
                    chosen = await finished
                    return chosen
                except (Unreachable, OSError, TimeoutError) as error:
                    last = error
        finally:
            for task in tasks:
                task.cancel()
            for tls_streams in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(tls_streams, BaseException) and tls_streams is not chosen:
                    tls_streams[1].transport.abort()
        assert last is not None
        raise last

    async def _literal(self, hosts: Iterable[str]) -> list[str]:
        return [host for host in hosts if self._policy.allows_host(host)]

    async def _resolved(self, hosts: Iterable[str]) -> list[str]:
        """Resolve the names among `hosts` to IP addresses. Names that do not resolve in time are left out."""
        loop = asyncio.get_running_loop()
        found: dict[str, None] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(DIAL_TIMEOUT.total_seconds()):
                for name in (host for host in hosts if not is_ip_address(host)):
                    with suppress(OSError, UnicodeError):
                        for *_, address in await loop.run_in_executor(self._resolver, _look_up, name):
                            found.setdefault(str(address[0]))
        return [host for host in found if self._policy.allows_host(host)][:MAX_HOSTS]

    async def _pinned(self, address: tuple[str, int], certificate_sha256: bytes) -> TlsStreams:
        tls_streams = await dial(address, self._context, DIAL_TIMEOUT)
        tls_object: ssl.SSLObject = tls_streams[1].get_extra_info("ssl_object")
        if not tls.is_pinned(tls_object, certificate_sha256):
            tls_streams[1].transport.abort()
            raise Unreachable(f"{address[0]} shows another certificate than the offer names")
        return tls_streams

    def _failed(self, peer_id: str, error: BaseException) -> None:
        count, _ = self._failures.get(peer_id, (0, 0.0))
        pause = min(MAX_BACKOFF, MIN_BACKOFF * 2 ** min(count, 10))
        self._failures[peer_id] = (count + 1, self._clock.monotonic() + pause.total_seconds())
        _log.info("direct connection failed", peer=peer_id, reason=str(error), retry_in_seconds=pause.total_seconds())

    def _dialled(self, peer_id: str, task: asyncio.Task[None]) -> None:
        self._dialling[peer_id].discard(task)
        if not self._dialling[peer_id]:
            del self._dialling[peer_id]


def _look_up(name: str) -> list[Any]:
    return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
