"""The swarm as the daemon sees it: one object that owns p2pd, gate, door and DHT, and implements `Network`.

    host = await SwarmHost.start(config, identity=…, authority=…, membership=…, deny=…, clock=…, timeout=…)
    host.handle("/atoll/round/1", serve_round)
    await host.publish_address(lifetime=timedelta(minutes=5))     # again before it runs out: the daemon's job
    stream = await host.open(peer_id, "/atoll/round/1", timedelta(seconds=10))
    await host.close(timedelta(seconds=5))

`died` resolves when p2pd ends by itself; the host is of no use then, and the daemon starts another. A seed is
the same host with `relay_service=True`, which may be the first of its swarm.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterable, Sequence
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
from atoll.core.records import MAX_MULTIADDRS, build_address_record, build_head_record, heads_key, nodes_key
from atoll.node.direct import protocol as direct
from atoll.node.direct.dialler import CheckedOffer
from atoll.node.direct.direct_path import DirectConfig, DirectPath, parse_offer
from atoll.node.direct.hosts import is_ip_address
from atoll.node.direct.pacer import Pacer
from atoll.node.swarm import hello, stripes
from atoll.node.swarm.addresses import AddressBook, announceable_multiaddrs, readable_seeds
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

MAX_LIFETIME = timedelta(seconds=540)  # a minute below what records allow: clocks differ


@dataclass(frozen=True)
class SwarmConfig:
    """Where this host listens and whom it asks first. Addresses are TCP multiaddrs; port 0 takes a free one."""

    identity_path: Path
    runtime_dir: Path  # for sockets, 0700
    listen: tuple[str, ...]
    announce: tuple[str, ...]  # what others should dial, where it differs from `listen`
    seeds: tuple[str, ...]  # each ends with /p2p/<peer id>
    relay_service: bool
    seeds_optional: bool = False  # seeds that do not answer yet are met later
    direct: DirectConfig | None = None  # TCP and TLS without libp2p, for bulk


class SwarmHost:
    """A member's presence in the swarm."""

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
        """p2pd up, gate up, DHT joined. Raises `ConfigError`, `PortInUse`, `Unreachable` (naming seeds), `Rejected`."""
        use_hivemind_log_handler("nowhere")
        gate = Gate(authority, membership, identity.peer_id, deny, clock)
        seeds = tuple(itertools.chain(*readable_seeds(config.seeds).values()))
        relays = () if config.relay_service else seeds
        daemon_config = P2pdConfig(
            config.identity_path, config.runtime_dir, config.listen, config.announce, config.relay_service, relays
        )
        p2pd = await P2pd.start(daemon_config, timeout)
        try:
            p2p = await GatedP2P.attach(p2pd.config, gate, AddressBook(clock), clock)
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
        """For supervision and for fault injection."""
        return self._p2pd.pid

    @property
    def handler_crashes(self) -> int:
        """Handlers that raised something else than an `AtollError`."""
        return self._acceptor.crashes + self._p2p.introductions.crashes

    @property
    def streams_refused(self) -> int:
        """Incoming streams that were turned away, for whatever reason."""
        return self._acceptor.refused.total()

    @property
    def traffic(self) -> Traffic:
        """What counts and slows the bytes to and from peers."""
        return self._p2p.traffic

    def multiaddrs(self) -> tuple[str, ...]:
        """Where we can be dialled, each with /p2p/<our peer id>."""
        return tuple(
            f"{address}/p2p/{self.peer_id}" for address in announceable_multiaddrs(self._p2p.listen_multiaddrs)
        )

    @property
    def direct_port(self) -> int | None:
        """Where members may dial directly; None without a direct path."""
        return self._direct.port if self._direct is not None else None

    @property
    def uplink_bytes_per_second(self) -> float:
        """What our side sends to all others together, as measured while it did, or our limit; 0: unknown."""
        measured = self._pacer.uplink_bytes_per_second
        limit = self.traffic.up.bytes_per_second
        return min(measured, limit) if measured and limit else measured

    def bytes_per_second_to(self, peer_id: str) -> float:
        """Bytes per second to a member, as measured, or our limit; infinite: it is near, 0: nothing is known."""
        return min(self._pacer.bytes_per_second_to(peer_id), self.traffic.up.bytes_per_second or math.inf)

    def path_limits_bytes_per_second(self) -> dict[str, float]:
        """Bytes per second, as measured, to those members whose path is slower than our uplink."""
        return {
            peer: rate for peer, rate in self._pacer.path_limits_bytes_per_second().items() if not is_ip_address(peer)
        }

    def direct_peers(self) -> frozenset[str]:
        """Members to which we have a direct connection; to the others all goes over libp2p."""
        return self._direct.peers() if self._direct is not None else frozenset()

    def handle(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol` to members; `ready()` tells when p2pd knows."""
        self._acceptor.handle(protocol, handler)
        self._registrations[protocol] = asyncio.create_task(self._p2p.control.serve_streams(protocol))

    async def ready(self) -> None:
        """Wait until all handed to `handle` can be dialled. Raises `Unreachable`; asked again, it tries again."""
        for protocol, task in self._registrations.items():
            if task.done() and (task.cancelled() or task.exception() is not None):
                self._registrations[protocol] = asyncio.create_task(self._p2p.control.serve_streams(protocol))
        pending = dict(self._registrations)
        await asyncio.gather(*pending.values(), return_exceptions=True)
        for protocol, task in pending.items():
            task.result()
            self._registrations.pop(protocol, None)

    async def open(self, peer_id: str, protocol: str, timeout: timedelta) -> SocketStream:
        """Dial a member (hello first, where there was none). Raises `Unreachable`, `Rejected`."""
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await self._p2p.introductions.ensure_admitted(peer_id)
                try:
                    return await self._open_admitted(peer_id, protocol, timeout)
                except HelloRequired:
                    await self._p2p.introductions.say_hello(peer_id)  # its table was lost, most likely by a restart
                    return await self._open_admitted(peer_id, protocol, timeout)
        except TimeoutError as error:
            raise DeadlineExceeded(f"peer {peer_id} did not open {protocol} within {timeout}") from error

    def learn_addresses(self, peer_id: str, multiaddrs: Iterable[str]) -> None:
        """Tell the address book where a peer can be dialled."""
        self._p2p.book.learn(peer_id, multiaddrs)

    def set_seeds(self, seeds: Sequence[str]) -> None:
        """These are the run's seeds now, with their addresses. Raises `ConfigError` where none can be read."""
        self._directory.set_seeds(seeds)

    async def publish_address(self, lifetime: timedelta) -> None:
        """Store where we can be dialled. Raises `Unreachable`."""
        await self.ready()
        await self._p2p.refresh_multiaddrs()
        expires = self._expiry(lifetime)
        addresses = self.multiaddrs()[:MAX_MULTIADDRS]
        record = build_address_record(self._identity, self.gate.membership, self._run_id, expires, addresses)
        await self._directory.store(nodes_key(self._run_id), record, expires)
        self._published = addresses

    async def address_changed(self) -> bool:
        """Whether we can be dialled elsewhere than published: relays and port mappings come and go."""
        await self._p2p.refresh_multiaddrs()
        addresses = self.multiaddrs()[:MAX_MULTIADDRS]
        return bool(addresses) and addresses != self._published  # none: behind NAT, and no relay found yet

    async def publish_head(self, round_number: int, manifest_hash: bytes, lifetime: timedelta) -> None:
        """Store which manifest is our newest. Raises `Unreachable`."""
        expires = self._expiry(lifetime)
        head = (round_number, manifest_hash)
        record = build_head_record(self._identity, self.gate.membership, self._run_id, expires, head)
        await self._directory.store(heads_key(self._run_id), record, expires)

    async def lookup_addresses(self) -> dict[str, tuple[str, ...]]:
        """Everybody's published addresses; the address book learns them too."""
        records = await self._directory.lookup(nodes_key(self._run_id))
        for peer_id, record in records.items():
            self.learn_addresses(peer_id, record.multiaddrs)
        return {peer_id: record.multiaddrs for peer_id, record in records.items()}

    async def lookup_heads(self) -> dict[str, tuple[int, bytes]]:
        """Everybody's newest manifest as published: round and hash. Claims, not facts: fetch and verify."""
        records = await self._directory.lookup(heads_key(self._run_id))
        return {peer_id: record.head for peer_id, record in records.items() if record.head is not None}

    def bytes_sent(self, protocol: str) -> int:
        """Bytes sent so far on streams of `protocol`, ended ones included; "dht" counts the DHT's messages."""
        return self.traffic.sent[protocol]

    def bytes_sent_total(self) -> int:
        """Bytes sent so far under all protocols."""
        return self.traffic.sent.total()

    async def close(self, timeout: timedelta) -> None:
        """End everything; p2pd gets `timeout` to end by itself. Leaves no process and no file. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        async with AsyncExitStack() as steps:  # last pushed runs first; each runs whatever the others raise
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
            await self._listen_directly(config.direct, config.runtime_dir)
        self._directory = MemberDirectory(self._p2p, authority, self._clock, config.seeds)
        await self._directory.join(seeds_optional=config.relay_service or config.seeds_optional, timeout=timeout)

    async def _listen_directly(self, config: DirectConfig, directory: Path) -> None:
        self._direct = DirectPath(
            config,
            directory=directory,
            gate=self.gate,
            traffic=self.traffic,
            clock=self._clock,
            serve=self._acceptor.admit_and_serve,
            max_frame_bytes=max_request_bytes,
            request_offer=self._request_offer,
            me=self.peer_id,
            pacer=self._pacer,
        )
        self._direct.listen(config)
        self._acceptor.handle(direct.PROTOCOL, self._direct.offer)
        await self._p2p.control.serve_streams(direct.PROTOCOL)

    async def _request_offer(self, peer_id: str, timeout: timedelta) -> CheckedOffer:
        stream = await self.open(peer_id, direct.PROTOCOL, timeout)
        try:
            frame = await stream.receive(timeout)
        finally:
            await stream.close()
        return parse_offer(frame, tuple(str(address) for address in self._p2p.book.known(peer_id)))

    async def _open_admitted(self, peer_id: str, protocol: str, timeout: timedelta) -> SocketStream:
        """Open a stream, directly where that is worth it and possible, and wait to be let in."""
        if self._direct is not None:
            stream = await self._direct.open(peer_id, protocol, timeout)
            if stream is not None:
                return stream
        return await self._open_over_libp2p(peer_id, protocol, timeout)

    async def _open_over_libp2p(self, peer_id: str, protocol: str, timeout: timedelta) -> SocketStream:
        if protocol in direct.BULK_PROTOCOLS:
            several = await stripes.open_stripes(lambda: self._open_stripe(peer_id, timeout), protocol)
            stream = self._stream(peer_id, protocol, *several)
        else:
            stream = self._stream(peer_id, protocol, *await self._p2p.open_socket(peer_id, protocol, timeout))
        self._acceptor.abort_on_eviction(stream)
        try:
            answer = await stream.receive(timeout)
            if answer.kind is not FrameKind.MESSAGE or answer.header:
                raise HelloRequired(f"peer {peer_id} did not let us in")
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

    def _expiry(self, lifetime: timedelta) -> float:
        return self._clock.unix() + min(lifetime, MAX_LIFETIME).total_seconds()

    def _connection_lost(self) -> None:
        if not self._closed:
            self._p2pd.declare_dead("it closed its control connection")
