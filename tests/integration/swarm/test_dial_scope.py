"""A member that publishes addresses of a victim's network, or offers one of its ports, makes nobody connect there."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import NoReturn

import pytest
from support.loopback_hosts import Lab

from atoll.core.clock import SystemClock
from atoll.core.errors import Unreachable
from atoll.core.identity import Identity
from atoll.core.records import build_address_record
from atoll.node.direct import dialler as dialling
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.direct.dialler import CheckedOffer, Dialler
from atoll.node.swarm.host import SwarmHost

SOON = timedelta(seconds=60)
# The swarm is at 127.0.0.1, as if that were its public address. A service of the victim's network is at 127.0.0.2.
PUBLIC_ONLY = DialPolicy(loopback=False, local=False, ranges=(ipaddress.ip_network("127.0.0.1/32"),))
ALL = DialPolicy(loopback=True, local=True)


class Service:
    """A service of the victim's network that counts its connections."""

    connections = 0
    port = 0

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._count, "127.0.0.2", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield

    async def _count(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.transport.abort()


async def publish(host: SwarmHost, addresses: tuple[str, ...]) -> None:
    expires = host._clock.unix() + 300
    record = build_address_record(host._identity, host.gate.membership, host._run_id, expires, addresses)
    await host._directory.store(record, expires)


@pytest.mark.parametrize(("dial", "reached"), [(PUBLIC_ONLY, False), (ALL, True)])
async def test_a_published_address_of_the_victims_network_is_not_dialled(
    lab: Lab, dial: DialPolicy, reached: bool
) -> None:
    service = Service()
    async with service.serve():
        seed = await lab.start("seed", relay_service=True)
        attacker = await lab.start("attacker", seeds=seed.multiaddrs())
        victim = await lab.start("victim", seeds=seed.multiaddrs(), dial=dial)
        target = f"/ip4/127.0.0.2/tcp/{service.port}"
        await publish(attacker, (target, f"{target}/p2p/{seed.peer_id}/p2p-circuit"))
        assert attacker.peer_id in await victim.lookup_addresses()
        with pytest.raises(Unreachable):
            await victim.open(attacker.peer_id, "/echo/1", SOON)
        assert bool(service.connections) is reached


async def refused(*_: object) -> NoReturn:
    raise Unreachable("nothing is registered here")


@pytest.mark.parametrize(("dial", "host", "reached"), [(PUBLIC_ONLY, "127.0.0.2", False), (ALL, "127.0.0.2", True)])
async def test_a_direct_connection_goes_to_no_such_host(dial: DialPolicy, host: str, reached: bool) -> None:
    service = Service()

    async def offer(_peer_id: str, _timeout: timedelta) -> CheckedOffer:
        return CheckedOffer((host,), service.port, b"c" * 32, b"t" * 32)

    async with service.serve():
        dialler = Dialler("me", offer, refused, SystemClock(), policy=dial, optimistic=())  # type: ignore[arg-type]
        assert await dialler.open(Identity.generate().peer_id, "/echo/1", SOON) is None
        await dialler.close()
        assert bool(service.connections) is reached


async def test_a_direct_connection_goes_to_no_low_port(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[tuple[str, int]] = []

    async def record(address: tuple[str, int], *_: object) -> NoReturn:
        dialled.append(address)
        raise Unreachable("not here")

    ports = iter((25, 1023, 1024))

    async def offer(_peer_id: str, _timeout: timedelta) -> CheckedOffer:
        return CheckedOffer(("127.0.0.1",), next(ports), b"c" * 32, b"t" * 32)

    monkeypatch.setattr(dialling, "dial", record)
    dialler = Dialler("me", offer, refused, SystemClock(), policy=ALL, optimistic=())  # type: ignore[arg-type]
    for _ in range(3):
        assert await dialler.open(Identity.generate().peer_id, "/echo/1", SOON) is None
    await dialler.close()
    assert dialled == [("127.0.0.1", 1024)]
