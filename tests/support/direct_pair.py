"""Two members with direct paths over real sockets; what goes over libp2p otherwise stays within the process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
from support.certificates import certificate_of
from support.memory_network import MemoryHub

from atoll.core.clock import SystemClock
from atoll.core.errors import Unreachable
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, MembershipVerifier
from atoll.node.direct import dialler, direct_path, listener, tickets
from atoll.node.direct import protocol as direct
from atoll.node.direct import stream as direct_stream
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.direct.dialler import CheckedOffer
from atoll.node.direct.direct_path import DirectConfig, DirectPath, parse_offer
from atoll.node.direct.pacer import Pacer
from atoll.node.direct.stream import DirectStream
from atoll.node.swarm.hello import Introductions
from atoll.node.swarm.stream_acceptor import StreamAcceptor, max_request_bytes
from atoll.node.wire.gate import Gate
from atoll.node.wire.traffic import Traffic
from atoll.node.wire.transport import Stream

SOON = timedelta(seconds=60)
TALK = "/talk/1"
CONFIG = DirectConfig(("127.0.0.1",), protocols=frozenset({TALK, "/atoll/state/1"}))


class Side:
    """One member of a pair."""

    def __init__(self, name: str, operator: Identity, hub: MemoryHub, directory: Path, config: DirectConfig) -> None:
        self.clock = SystemClock()
        self.identity = Identity.generate()
        self.peer_id = self.identity.peer_id
        certificate = certificate_of(self.identity, operator, self.clock.unix(), name=name)
        self.gate = Gate(
            MembershipVerifier(operator.public_key, "reef"), certificate, self.peer_id, EMPTY_DENY_LIST, self.clock
        )
        self.traffic, self.pacer = Traffic(self.clock), Pacer(self.clock)
        self.traffic.bulk_send_callbacks.append(self.pacer.wake)
        self.acceptor = StreamAcceptor(
            self.gate, Introductions(self.gate, _no_socket, self.traffic, self.clock), self.traffic
        )
        self.network = hub.join(self.peer_id)
        self.offers_requested = 0
        self.hosts: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/1",)  # that this side knows for others
        self.path = DirectPath(
            config,
            directory=directory,
            gate=self.gate,
            traffic=self.traffic,
            clock=self.clock,
            serve=self.acceptor.admit_and_serve,
            max_frame_bytes=max_request_bytes,
            request_offer=self.request_offer,
            pacer=self.pacer,
            dial=DialPolicy(loopback=True, local=True),
        )
        self.network.handle(direct.PROTOCOL, self.path.serve_offer)
        self.path.listen(config)

    async def request_offer(self, peer_id: str, timeout: timedelta = SOON) -> CheckedOffer:
        self.offers_requested += 1
        stream = await self.network.open(peer_id, direct.PROTOCOL, timeout)
        try:
            return parse_offer(await stream.receive(timeout), self.hosts)
        finally:
            await stream.close()

    async def talk(self, other: Side, protocol: str = TALK) -> DirectStream:
        """Open a direct stream; fails if there is none."""
        stream = await self.path.open(other.peer_id, protocol, SOON)
        assert stream is not None
        return stream

    async def close(self) -> None:
        await self.path.close()
        await self.pacer.close()
        await self.acceptor.close()


@dataclass
class Pair:
    """`a` dials, `b` is dialled."""

    a: Side
    b: Side

    async def settled(self) -> None:
        """Wait until every stream has ended on both sides: each connection is idle or closed."""
        async with asyncio.timeout(SOON.total_seconds()):
            while self.b.acceptor._active_streams or any(
                one.is_open and one not in [kept for kept, _ in self.a.path._dialler._idle.get(one.peer_id, ())]
                for made in self.a.path._dialler._connections_by_peer.values()
                for one in made
            ):
                await asyncio.sleep(0.005)


@contextmanager
def unhurried_dialling() -> Iterator[None]:
    """Longer timeouts, so that a test process that pauses neither falls back to libp2p nor closes a connection."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONNECT_WAIT", "DIAL_TIMEOUT", "OFFER_TIMEOUT", "ACCEPT_TIMEOUT"):
            patch.setattr(dialler, name, SOON)
        patch.setattr(dialler, "MIN_BACKOFF", dialler.MAX_BACKOFF)
        patch.setattr(dialler, "OPTIMISTIC_WITHIN", timedelta(hours=1))
        patch.setattr(direct_path, "_OFFER_TIMEOUT", SOON)
        patch.setattr(listener, "STRANGER_TIMEOUT", SOON)
        patch.setattr(direct_stream, "END_TIMEOUT", SOON)
        patch.setattr(tickets, "LIFETIME", timedelta(hours=1))
        yield


@asynccontextmanager
async def direct_pair(directory: Path, optimistic: Collection[str] = ()) -> AsyncIterator[Pair]:
    """Two members of one run that know each other; `optimistic`: protocols that need not await the accept."""
    operator, hub, config = Identity.generate(), MemoryHub(), replace(CONFIG, optimistic=frozenset(optimistic))
    pair = Pair(*(Side(name, operator, hub, directory, config) for name in "ab"))
    pair.a.gate.admit(pair.b.peer_id, pair.b.gate.hello())
    pair.b.gate.admit(pair.a.peer_id, pair.a.gate.hello())
    try:
        with unhurried_dialling():
            yield pair
    finally:
        await pair.a.close()
        await pair.b.close()
        await hub.close()
    assert not pair.a.gate._streams
    assert not pair.b.gate._streams
    assert not os.listdir(directory)  # no key on disk


async def _no_socket(peer_id: str, protocol: str, timeout: timedelta) -> NoReturn:
    raise Unreachable("there is no libp2p here")


async def shout(stream: Stream) -> None:
    """A handler that echoes frames until the peer closes."""
    while True:
        frame = await stream.receive(SOON)
        await stream.send(frame.kind, frame.header, frame.body)
