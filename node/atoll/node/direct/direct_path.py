"""The direct path of one host: listener and dialler behind the host's gate and door.

    path = DirectPath(config, gate=…, traffic=…, clock=…, serve=door.let_in, ask=…, max_frame_bytes=…)
    door.handle(PROTOCOL, path.offer)
    stream = await path.open(peer_id, "/atoll/average/1", timeout)     # None: take libp2p

How a peer is told from a stranger: a libp2p stream proves who asks for a way in; the answer pins our certificate and
holds a ticket that only this peer got. From the ticket on, each frame passes the gate, and the gate closes the
connection of a peer that it evicts.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from google.protobuf.message import DecodeError

from atoll.core.clock import Clock
from atoll.core.errors import PeerMisbehaved, PortInUse, Unreachable
from atoll.core.frames import Frame, FrameKind
from atoll.node.direct import tls
from atoll.node.direct.dialler import CheckedOffer, Dialler
from atoll.node.direct.hosts import hosts_in
from atoll.node.direct.listener import Listener
from atoll.node.direct.pacer import Pacer
from atoll.node.direct.protocol import BULK_PROTOCOLS, MAX_HOSTS, OPTIMISTIC_PROTOCOLS
from atoll.node.direct.stream import Connection, DirectStream
from atoll.node.direct.tickets import TICKET_BYTES, Tickets
from atoll.node.direct.tls_streams import TlsStreams, on_connection_lost
from atoll.node.wire.gate import Gate
from atoll.node.wire.traffic import Traffic
from atoll.node.wire.transport import Stream
from atoll.v1 import dataplane_pb2 as dp

_SHA256_BYTES = 32
_OFFER_TIMEOUT = timedelta(seconds=5)  # for the other side to hang up after it


@dataclass(frozen=True)
class DirectConfig:
    """Where to listen: IP addresses, and ports in the order of preference, 0 for a free one."""

    hosts: tuple[str, ...]
    ports: tuple[int, ...] = (0,)
    protocols: frozenset[str] = BULK_PROTOCOLS
    optimistic: frozenset[str] = OPTIMISTIC_PROTOCOLS


class DirectPath:
    """One host's direct connections, both ways."""

    def __init__(
        self,
        config: DirectConfig,
        *,
        directory: Path,
        gate: Gate,
        traffic: Traffic,
        clock: Clock,
        serve: Callable[[DirectStream], Awaitable[None]],
        max_frame_bytes: Callable[[str], int],
        request_offer: Callable[[str, timedelta], Awaitable[CheckedOffer]],
        me: str,
        pacer: Pacer,
    ) -> None:
        """`me` is our peer id."""
        context, self._certificate_sha256 = tls.listening_context(directory, clock.unix())
        self._protocols = config.protocols
        self._gate = gate
        self._traffic = traffic
        self._closed = False
        self._tickets = Tickets(clock, me)
        self._connections: set[Connection] = set()  # both ways
        self._pacer = pacer
        loopback = any(ipaddress.ip_address(host).is_loopback for host in config.hosts)
        self._dialler = Dialler(
            me, request_offer, self._register, clock, loopback=loopback, optimistic=config.optimistic
        )
        self._listener = Listener(context, self._tickets, self._register, serve, config.protocols, max_frame_bytes)

    @property
    def port(self) -> int:
        """The TCP port that members are told."""
        return self._listener.port

    @property
    def strangers_refused(self) -> int:
        """Connections that brought no good ticket."""
        return self._listener.strangers_refused

    def peers(self) -> frozenset[str]:
        """Whom we have dialled and are connected to."""
        return self._dialler.connected()

    def listen(self, config: DirectConfig) -> None:
        """On the first of the ports that is free. Raises `PortInUse`."""
        for port in config.ports:
            try:
                self._listener.listen(config.hosts, port)
                return
            except PortInUse:
                if port == config.ports[-1]:
                    raise

    async def open(self, peer_id: str, protocol: str, timeout: timedelta) -> DirectStream | None:
        """A conversation, or None when it must go another way. Raises what the peer refuses with."""
        if protocol not in self._protocols:
            return None
        return await self._dialler.open(peer_id, protocol, timeout)

    async def offer(self, stream: Stream) -> None:
        """Answers who asks for a way in; a handler like any other."""
        offer = dp.DirectOffer(
            port=self.port,
            certificate_sha256=self._certificate_sha256,
            ticket=self._tickets.issue(stream.peer_id),
        )
        await stream.send(FrameKind.MESSAGE, offer.SerializeToString())
        with suppress(Unreachable):
            await stream.receive(_OFFER_TIMEOUT)

    async def close(self) -> None:
        """End every connection and take no new one. Leaves nothing."""
        self._closed = True
        await self._dialler.close()
        await self._listener.close()
        left = tuple(self._connections)
        for connection in left:
            connection.abort()
        await asyncio.gather(*(connection.writer.wait_closed() for connection in left), return_exceptions=True)

    def _register(self, peer_id: str, wire: TlsStreams) -> Connection:
        """A connection whose other end is proved to be `peer_id`. Raises `Banned`, `HelloRequired`, `Unreachable`."""
        self._gate.require(peer_id)
        reader, writer = wire
        if writer.is_closing() or self._closed:
            raise Unreachable(f"peer {peer_id} hung up")
        connection = Connection(
            peer_id,
            reader,
            writer,
            require_member=lambda: self._gate.require(peer_id),
            traffic=self._traffic,
        )
        reader.count_arrived = self._traffic.count_arrived
        self._connections.add(connection)
        self._gate.opened(peer_id, connection)
        self._pacer.add(connection)
        on_connection_lost(writer, lambda: self._lost(connection))
        return connection

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._gate.closed(connection.peer_id, connection)
        self._pacer.remove(connection)
        self._dialler.lost(connection)


def parse_offer(frame: Frame, known: tuple[str, ...]) -> CheckedOffer:
    """What a peer answers, for where our own book knows it (multiaddrs). Raises `PeerMisbehaved`.

    It does not name hosts: whoever could would have others dial whom it likes.
    """
    try:
        offer = dp.DirectOffer.FromString(frame.header)
    except DecodeError as error:
        raise PeerMisbehaved("an offer of a direct path does not parse") from error
    sizes = (len(offer.ticket), len(offer.certificate_sha256))
    if sizes != (TICKET_BYTES, _SHA256_BYTES) or not 0 < offer.port < 65536:
        raise PeerMisbehaved("an offer of a direct path is not what it must be")
    return CheckedOffer(hosts_in(known, MAX_HOSTS), offer.port, offer.certificate_sha256, offer.ticket)
