"""SwarmHost: this node's presence in the swarm. It owns p2pd, gate, acceptor and DHT, and implements `Network`.

    host = await SwarmHost.start(config, identity=…, authority=…, membership=…, deny=…, clock=…, timeout=…)
    host.handle("/atoll/round/1", serve_round)
    await host.publish_address(lifetime=timedelta(minutes=5))     # the daemon repeats this before the record expires
    stream = await host.open(peer_id, "/atoll/round/1", timedelta(seconds=10))
    await host.close(timedelta(seconds=5))

`died` resolves when p2pd ends by itself; the host is unusable then, and the daemon starts another. A seed is the same
host with `relay_service=True`; it may be the first of its swarm.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from hivemind.utils.logging import use_hivemind_log_handler

from atoll.core.clock import Clock
from atoll.core.errors import ChildDied, DeadlineExceeded, HelloRequired
from atoll.core.frames import FrameKind
from atoll.core.identity import Identity
from atoll.core.membership import DenyList, MembershipVerifier
from atoll.core.records import MAX_MULTIADDRS, build_address_record, page_key, page_keys
from atoll.node.direct import protocol as direct
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.direct.dialler import CheckedOffer
from atoll.node.direct.direct_path import DirectConfig, DirectPath, parse_offer
from atoll.node.direct.hosts import is_ip_address
from atoll.node.direct.pacer import Pacer
from atoll.node.swarm import hello, stripes
from atoll.node.swarm.addresses import announceable_multiaddrs, readable_seeds
from atoll.node.swarm.dht import MemberDirectory
from atoll.node.swarm.p2p import GatedP2P
from atoll.node.swarm.p2pd import P2pd, P2pdConfig
from atoll.node.swarm.p2pd_sockets import P2pdSockets
from atoll.node.swarm.stream_acceptor import StreamAcceptor, max_request_bytes
from atoll.node.wire.gate import Gate
from atoll.node.wire.streams import ByteReader, ByteWriter, SocketStream
from atoll.node.wire.traffic import Traffic
from atoll.node.wire.transport import Handler
from atoll.v1 import common_pb2 as pb

MAX_LIFETIME = timedelta(seconds=540)  # a minute below the limit of records: clocks differ


@dataclass(frozen=True)
class SwarmConfig:
    """Where this host listens, and its seeds. Addresses are TCP multiaddrs; port 0 takes a free one."""

    identity_path: Path
    runtime_dir: Path  # for sockets, 0700
    listen: tuple[str, ...]
    announce: tuple[str, ...]  # addresses that peers should dial, if they differ from `listen`
    seeds: tuple[str, ...]  # each ends with /p2p/<peer id>
    relay_service: bool
    dial: DialPolicy  # which addresses of peers it dials
    seeds_optional: bool = False  # start even if no seed answers yet
    direct: DirectConfig | None = None  # direct connections for bulk data; None disables them


class SwarmHost:
    """A member's presence in the swarm.

    It has more than 20 methods: it is the facade through which the daemon uses gate, DHT, p2pd and direct path.
    """

    def __init__(
        self, identity: Identity, authority: MembershipVerifier, p2pd: P2pd, p2p: GatedP2P, clock: Clock
    ) -> None:
        self.gate: Gate = p2p.gate
        self.died: asyncio.Future[ChildDied] = p2pd.died
        self._identity = identity
        self._run_id = authority.run_id
        self._p2pd = p2pd
        self._p2p = p2p
        self._clock = clock
        self._acceptor = StreamAcceptor(p2p.gate, p2p.introductions, p2p.traffic)
        self._directory = MemberDirectory(p2p, authority, clock, ())
        self._pacer = Pacer(clock)
        self._p2pd_sockets = P2pdSockets(p2pd.pid, self._pacer)
        self.traffic.bulk_send_callbacks += [self._pacer.wake, self._p2pd_sockets.wake]
        self._direct: DirectPath | None = None
        self._registrations: dict[str, asyncio.Task[None]] = {}  # by protocol, until p2pd knows it
        self._closed = False
        self._published: tuple[str, ...] = ()
        p2p.control.on_lost(self._connection_lost)

    @classmethod
    async def start(
        cls,
        config: SwarmConfig,
        *,
        identity: Identity,
        authority: MembershipVerifier,
        membership: pb.Signed,
        deny: DenyList,
        clock: Clock,
        timeout: timedelta,
    ) -> SwarmHost:
        """Start p2pd and the gate, and join the DHT.

        Raises `ConfigError`, `PortInUse`, `Rejected`, and `Unreachable` that names the seeds.
        """
        use_hivemind_log_handler("nowhere")
        gate = Gate(authority, membership, identity.peer_id, deny, clock)
        seeds = tuple(itertools.chain(*readable_seeds(config.seeds).values()))
        relays = () if config.relay_service else tuple(filter(config.dial.allows, seeds))
        daemon_config = P2pdConfig(
            config.identity_path, config.runtime_dir, config.listen, config.announce, config.relay_service, relays
        )
        p2pd = await P2pd.start(daemon_config, timeout)
        try:
            p2p = await GatedP2P.attach(p2pd.config, gate, config.dial, clock)
        except BaseException:
            await p2pd.stop(timedelta(0))
            raise
        host = cls(identity, authority, p2pd, p2p, clock)
        try:
            await host._join(authority, config, timeout)
        except BaseException:
            await host.close(timedelta(0))
            raise
        return host

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def p2pd_pid(self) -> int:
        """The process id of p2pd, for supervision and fault injection."""
        return self._p2pd.pid

    @property
    def handler_crashes(self) -> int:
        """Handlers that raised another exception than `AtollError`."""
        return self._acceptor.crashes + self._p2p.introductions.crashes

    @property
    def streams_refused(self) -> int:
        """Incoming streams that were refused, for any reason."""
        return self._acceptor.refused.total()

    @property
    def traffic(self) -> Traffic:
        """The byte counters and rate limiters for peer traffic."""
        return self._p2p.traffic

    def multiaddrs(self) -> tuple[str, ...]:
        """Addresses at which peers can dial this node, each with /p2p/<own peer id>."""
        return tuple(
            f"{address}/p2p/{self.peer_id}" for address in announceable_multiaddrs(self._p2p.listen_multiaddrs)
        )

    @property
    def direct_port(self) -> int | None:
        """The TCP port for direct connections; None if they are disabled."""
        return self._direct.port if self._direct is not None else None

    @property
    def uplink_bytes_per_second(self) -> float:
        """Measured upload rate to all peers together, at most the upload limit; 0 if unknown."""
        measured = self._pacer.uplink_bytes_per_second
        limit = self.traffic.up.bytes_per_second
        return min(measured, limit) if measured and limit else measured

    def bytes_per_second_to(self, peer_id: str) -> float:
        """Measured rate to a member, at most the upload limit.

        Infinite for a member on the local network. 0: unknown.
        """
        return min(self._pacer.bytes_per_second_to(peer_id), self.traffic.up.bytes_per_second or math.inf)

    def path_limits_bytes_per_second(self) -> dict[str, float]:
        """Measured rates to the members whose path is slower than this node's uplink."""
        return {
            peer: rate for peer, rate in self._pacer.path_limits_bytes_per_second().items() if not is_ip_address(peer)
        }

    def direct_peers(self) -> frozenset[str]:
        """Members to which this node has dialled a direct connection."""
        return self._direct.peers() if self._direct is not None else frozenset()

    def handle(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol` to members; `ready()` waits until p2pd delivers its streams."""
        self._acceptor.handle(protocol, handler)
        self._registrations[protocol] = asyncio.create_task(self._p2p.control.serve_streams(protocol))

    async def ready(self) -> None:
        """Wait until peers can dial all protocols given to `handle`.

        Raises `Unreachable`; it may be called again then.
        """
        for protocol, task in self._registrations.items():
            if task.done() and (task.cancelled() or task.exception() is not None):
                self._registrations[protocol] = asyncio.create_task(self._p2p.control.serve_streams(protocol))
        pending = dict(self._registrations)
        await asyncio.gather(*pending.values(), return_exceptions=True)
        for protocol, task in pending.items():
            task.result()
            self._registrations.pop(protocol, None)

    async def open(self, peer_id: str, protocol: str, timeout: timedelta) -> SocketStream:
        """Open a stream to a member; say hello first if needed. Raises `Unreachable`, `Rejected`."""
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await self._p2p.introductions.ensure_admitted(peer_id)
                try:
                    return await self._open_admitted(peer_id, protocol, timeout)
                except HelloRequired:
                    # the peer lost its table of members, probably by a restart
                    await self._p2p.introductions.say_hello(peer_id)
                    return await self._open_admitted(peer_id, protocol, timeout)
        except TimeoutError as error:
            raise DeadlineExceeded(f"peer {peer_id} did not open {protocol} within {timeout}") from error

    def learn_addresses(self, peer_id: str, multiaddrs: Iterable[str]) -> None:
        """Put the addresses of a peer into the address book."""
        self._p2p.book.learn(peer_id, multiaddrs)

    def set_seeds(self, seeds: Sequence[str]) -> None:
        """Replace the run's seeds and their addresses. Raises `ConfigError` if no address parses."""
        self._directory.set_seeds(seeds)

    async def publish_address(self, lifetime: timedelta) -> None:
        """Store this node's addresses in the DHT. Raises `Unreachable`."""
        await self.ready()
        await self._p2p.refresh_multiaddrs()
        expires = self._clock.unix() + min(lifetime, MAX_LIFETIME).total_seconds()
        addresses = self.multiaddrs()[:MAX_MULTIADDRS]
        record = build_address_record(self._identity, self.gate.membership, self._run_id, expires, addresses)
        await self._directory.store(record, expires)
        self._published = addresses

    async def address_changed(self) -> bool:
        """Return whether this node's addresses differ from the published ones: relays and port mappings change."""
        await self._p2p.refresh_multiaddrs()
        addresses = self.multiaddrs()[:MAX_MULTIADDRS]
        return bool(addresses) and addresses != self._published  # empty: behind NAT, and no relay found yet

    async def lookup_addresses(self, peers: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
        """Look up the published addresses of all members, and put them into the address book.

        With `peers`, only the pages of these peers are read, which also contain other members' addresses.
        """
        pages = {page_key(self._run_id, peer) for peer in peers} or page_keys(self._run_id)
        records = await self._directory.lookup(pages)
        for peer_id, record in records.items():
            self.learn_addresses(peer_id, record.multiaddrs)
        return {peer_id: record.multiaddrs for peer_id, record in records.items()}

    def bytes_sent(self, protocol: str) -> int:
        """Bytes sent so far on streams of `protocol`, including ended ones; "dht" counts the DHT's messages."""
        return self.traffic.sent[protocol]

    def bytes_sent_total(self) -> int:
        """Bytes sent so far under all protocols."""
        return self.traffic.sent.total()

    async def close(self, timeout: timedelta) -> None:
        """Stop everything; p2pd gets `timeout` to stop. Leaves no process and no file. May be called twice."""
        if self._closed:
            return
        self._closed = True
        async with AsyncExitStack() as steps:  # the step added last runs first; each runs even if others raise
            steps.push_async_callback(self._p2pd.stop, timeout)
            steps.push_async_callback(self._p2p.detach)
            steps.push_async_callback(self._pacer.close)
            steps.push_async_callback(self._p2pd_sockets.close)
            if not self.died.done():
                steps.push_async_callback(self._directory.close, timeout)
            steps.push_async_callback(self._acceptor.close)
            if self._direct is not None:
                steps.push_async_callback(self._direct.close)
            steps.callback(self.gate.abort_all)
            for task in self._registrations.values():
                task.cancel()
            await asyncio.gather(*self._registrations.values(), return_exceptions=True)

    async def _join(self, authority: MembershipVerifier, config: SwarmConfig, timeout: timedelta) -> None:
        await self._acceptor.listen(self._p2pd.config.stream_socket)
        await self._p2p.control.serve_streams(hello.PROTOCOL)
        await self._p2p.control.serve_streams(stripes.PROTOCOL)
        if config.direct is not None:
            await self._listen_directly(config.direct, config.runtime_dir, config.dial)
        self._directory = MemberDirectory(self._p2p, authority, self._clock, config.seeds)
        await self._directory.join(seeds_optional=config.relay_service or config.seeds_optional, timeout=timeout)

    async def _listen_directly(self, config: DirectConfig, directory: Path, dial: DialPolicy) -> None:
        self._direct = DirectPath(
            config,
            directory=directory,
            gate=self.gate,
            traffic=self.traffic,
            clock=self._clock,
            serve=self._acceptor.admit_and_serve,
            max_frame_bytes=max_request_bytes,
            request_offer=self._request_offer,
            pacer=self._pacer,
            dial=dial,
        )
        self._direct.listen(config)
        self._acceptor.handle(direct.PROTOCOL, self._direct.serve_offer)
        await self._p2p.control.serve_streams(direct.PROTOCOL)

    async def _request_offer(self, peer_id: str, timeout: timedelta) -> CheckedOffer:
        stream = await self.open(peer_id, direct.PROTOCOL, timeout)
        try:
            frame = await stream.receive(timeout)
        finally:
            await stream.close()
        return parse_offer(frame, tuple(str(address) for address in self._p2p.book.known(peer_id)))

    async def _open_admitted(self, peer_id: str, protocol: str, timeout: timedelta) -> SocketStream:
        """Open a stream, on a direct connection if the protocol and the peer allow it, and wait for the accept."""
        if self._direct is not None:
            stream = await self._direct.open(peer_id, protocol, timeout)
            if stream is not None:
                return stream
        return await self._open_over_libp2p(peer_id, protocol, timeout)

    async def _open_over_libp2p(self, peer_id: str, protocol: str, timeout: timedelta) -> SocketStream:
        if protocol in direct.BULK_PROTOCOLS:
            striped = await stripes.open_stripes(lambda: self._open_stripe(peer_id, timeout), protocol)
            stream = self._stream(peer_id, protocol, *striped)
        else:
            stream = self._stream(peer_id, protocol, *await self._p2p.open_socket(peer_id, protocol, timeout))
        self._acceptor.abort_on_eviction(stream)
        try:
            answer = await stream.receive(timeout)
            if answer.kind is not FrameKind.MESSAGE or answer.header:
                raise HelloRequired(f"peer {peer_id} did not accept a stream of {protocol}")
        except BaseException:
            stream.abort()
            raise
        return stream

    async def _open_stripe(self, peer_id: str, timeout: timedelta) -> tuple[SocketStream, stripes.ReaderWriter]:
        ends = await self._p2p.open_socket(peer_id, stripes.PROTOCOL, timeout)
        return self._stream(peer_id, stripes.PROTOCOL, *ends), ends

    def _stream(self, peer_id: str, protocol: str, reader: ByteReader, writer: ByteWriter) -> SocketStream:
        return SocketStream(
            peer_id,
            protocol,
            reader,
            writer,
            require_member=lambda: self.gate.require(peer_id),
            traffic=self._p2p.traffic,
        )

    def _connection_lost(self) -> None:
        if not self._closed:
            self._p2pd.declare_dead("it closed its control connection")
