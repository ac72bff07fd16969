"""Outsiders that hold a seed's places for hellos in silence: a newcomer gets in all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg
from hivemind.proto import p2pd_pb2 as p2pd
from support.eventually import eventually
from support.loopback_hosts import Lab

from atoll.core.identity import Identity
from atoll.node.swarm import hello
from atoll.node.swarm.host import SwarmHost

STREAMS_PER_OUTSIDER = 2
PAUSE_SECONDS = 0.1  # before an outsider opens its next stream: a round trip


class Outsiders:
    """Peers that open streams for hellos, say nothing, and open others when these end.

    Each of them would need a p2pd. So they speak to the seed's stream socket as its p2pd does for incoming streams.
    """

    def __init__(self, seed: SwarmHost, count: int) -> None:
        self._socket = str(seed._p2pd.config.stream_socket)
        self._peers = [PeerID.from_base58(Identity.generate().peer_id) for _ in range(count)]
        self.opened = 0

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._hold(peer)) for peer in self._peers for _ in range(STREAMS_PER_OUTSIDER)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self, peer: PeerID) -> None:
        while True:
            with suppress(OSError):
                await self._be_silent(peer)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _be_silent(self, peer: PeerID) -> None:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            info = p2pd.StreamInfo(peer=peer.to_bytes(), addr=b"\x04\x7f\x00\x00\x01", proto=hello.PROTOCOL)
            await write_pbmsg(writer, info)
            self.opened += 1
            await reader.read()
        finally:
            writer.transport.abort()


@pytest.mark.parametrize("count", [64, 160])
async def test_a_newcomer_gets_in_while_silent_outsiders_hold_every_place(lab: Lab, count: int) -> None:
    seed = await lab.start("seed", relay_service=True)
    member = await lab.start("member", seeds=seed.multiaddrs())
    outsiders = Outsiders(seed, count)
    async with outsiders.hold():
        await eventually(lambda: outsiders.opened >= STREAMS_PER_OUTSIDER * count)
        for name in ("first", "second", "third"):
            newcomer = await lab.start(name, seeds=seed.multiaddrs())
            assert seed.gate.is_admitted(newcomer.peer_id)
        assert seed.gate.is_admitted(member.peer_id)
