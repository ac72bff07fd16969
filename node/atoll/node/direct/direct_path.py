"""DirectPath: the direct connections of one host, which joins listener and dialler to the host's gate and acceptor.

    path = DirectPath(config, gate=…, traffic=…, clock=…, serve=acceptor.admit_and_serve, request_offer=…, …)
    acceptor.handle(PROTOCOL, path.serve_offer)
    stream = await path.open(peer_id, "/atoll/average/1", timeout)     # None: use libp2p

How a peer authenticates: it asks for a direct offer on a libp2p stream, which proves its identity. The answer pins this
node's certificate and contains a ticket for this peer only. After the ticket is shown, each frame passes the gate, and
the gate closes the connection of a peer that it evicts.
"""

from __future__ import annotations

import asyncio
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
from atoll.node.direct.dial_policy import DialPolicy
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
_OFFER_TIMEOUT = timedelta(seconds=5)  # for the peer to close its stream after the offer


@dataclass(frozen=True)
class DirectConfig:
    """Where to listen: IP addresses, and ports in order of preference; port 0 takes a free one."""

    hosts: tuple[str, ...]
    ports: tuple[int, ...] = (0,)
    protocols: frozenset[str] = BULK_PROTOCOLS
    optimistic: frozenset[str] = OPTIMISTIC_PROTOCOLS


class DirectPath:
    """The direct connections of one host, dialled and accepted."""

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
        pacer: Pacer,
        dial: DialPolicy,
    ) -> None:
        """`dial`: policy for the addresses that this node may dial."""
        context, self._certificate_sha256 = tls.listening_context(directory, clock.unix())
        self._protocols = config.protocols
        self._gate = gate
        self._traffic = traffic
        self._closed = False
        self._tickets = Tickets(clock, gate.own_peer_id)
        self._connections: set[Connection] = set()  # dialled and accepted
        self._pacer = pacer
        self._dialler = Dialler(
            gate.own_peer_id, request_offer, self._register, clock, policy=dial, optimistic=config.optimistic
        )
        self._listener = Listener(context, self._tickets, self._register, serve, config.protocols, max_frame_bytes)

    @property
    def port(self) -> int:
        """The TCP port that this node's offers contain."""
        return self._listener.port

    @property
    def strangers_refused(self) -> int:
        """Incoming connections that showed no valid ticket."""
        return self._listener.strangers_refused

    def peers(self) -> frozenset[str]:
        """Peers that this node dialled and is connected to."""
        return self._dialler.connected()

    def listen(self, config: DirectConfig) -> None:
        """Listen on the first free port of the config. Raises `PortInUse`."""
        for port in config.ports:
            try:
                self._listener.listen(config.hosts, port)
                return
            except PortInUse:
                if port == config.ports[-1]:
                    raise

    async def open(self, peer_id: str, protocol: str, timeout: timedelta) -> DirectStream | None:
        """Open a stream to a peer, or return None if it must use libp2p. Raises the peer's refusal."""
        if protocol not in self._protocols:
            return None
        return await self._dialler.open(peer_id, protocol, timeout)

    async def serve_offer(self, stream: Stream) -> None:
        """Handle a request for a direct offer: send port, certificate hash and a new ticket."""
        offer = dp.DirectOffer(
            port=self.port,
            certificate_sha256=self._certificate_sha256,
            ticket=self._tickets.issue(stream.peer_id),
        )
        await stream.send(FrameKind.MESSAGE, offer.SerializeToString())
        with suppress(Unreachable):
            await stream.receive(_OFFER_TIMEOUT)

    async def close(self) -> None:
        """Close every connection and accept no new one; return when all are closed."""
        self._closed = True
        await self._dialler.close()
        await self._listener.close()
        left = tuple(self._connections)
        for connection in left:
            connection.abort()
        await asyncio.gather(*(connection.writer.wait_closed() for connection in left), return_exceptions=True)

    def _register(self, peer_id: str, tls_streams: TlsStreams) -> Connection:
        """Register a connection whose peer has proved to be `peer_id`.

        Raises `Banned`, `HelloRequired`, `Unreachable`.
        """
        self._gate.require(peer_id)
        reader, writer = tls_streams
        if writer.is_closing() or self._closed:
            raise Unreachable(f"the direct connection with peer {peer_id} was closed")
        connection = Connection(
            peer_id,
            reader,
            writer,
            require_member=lambda: self._gate.require(peer_id),
            traffic=self._traffic,
        )
        reader.count_arrived = self._traffic.count_arrived
        self._connections.add(connection)
        self._gate.track_stream(peer_id, connection)
        self._pacer.add(connection)
        on_connection_lost(writer, lambda: self._lost(connection))
        return connection

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._gate.untrack_stream(connection.peer_id, connection)
        self._pacer.remove(connection)
        self._dialler.lost(connection)


def parse_offer(frame: Frame, known: tuple[str, ...]) -> CheckedOffer:
    """Validate a peer's offer and add the hosts of `known`, the peer's multiaddrs. Raises `PeerMisbehaved`.

    An offer names no hosts: otherwise a peer could make other members dial any address.
    """
    try:
        offer = dp.DirectOffer.FromString(frame.header)
    except DecodeError as error:
        raise PeerMisbehaved("a DirectOffer does not parse") from error
    sizes = (len(offer.ticket), len(offer.certificate_sha256))
    if sizes != (TICKET_BYTES, _SHA256_BYTES) or not 0 < offer.port < 65536:
        raise PeerMisbehaved(
            f"a DirectOffer has a ticket of {sizes[0]} bytes (must be {TICKET_BYTES}), a certificate hash of "
            f"{sizes[1]} bytes (must be {_SHA256_BYTES}) and port {offer.port} (must be 1 to 65535)"
        )
    return CheckedOffer(hosts_in(known, MAX_HOSTS), offer.port, offer.certificate_sha256, offer.ticket)
