"""A member's presence in a swarm, for benchmarks that need hosts and no coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from atoll.core.clock import SystemClock
from atoll.core.errors import AtollError
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, MembershipVerifier, issue_membership
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.direct.direct_path import DirectConfig
from atoll.node.swarm.host import SwarmConfig, SwarmHost
from atoll.node.wire.transport import Stream

OPERATOR_KEY = "operator.key"
_HELLO = "/bench/hello/1"
_GREETING = timedelta(seconds=30)
_TRIES = 10  # to meet somebody: two that dial each other at once may both fail


async def start_host(
    folder: Path,
    name: str,
    seeds: tuple[str, ...],
    *,
    run_id: str,
    relay_service: bool,
    address: str = "127.0.0.1",
    direct: DirectConfig | None = None,
    timeout: timedelta = timedelta(seconds=60),
) -> SwarmHost:
    """A host whose key, and its operator's, stand in `folder`. Raises as `SwarmHost.start`."""
    operator, clock = Identity.load_or_create(folder / OPERATOR_KEY), SystemClock()
    identity = Identity.load_or_create(folder / f"{name}.key")
    membership = issue_membership(
        operator,
        public_key=identity.public_key,
        run_id=run_id,
        roles=frozenset({"node"}),
        epoch=1,
        now=clock.unix(),
        node_name=name,
    )
    host = await SwarmHost.start(
        SwarmConfig(
            identity_path=folder / f"{name}.key",
            runtime_dir=folder / name,
            listen=(f"/ip4/{address}/tcp/0",),
            announce=(),
            seeds=seeds,
            relay_service=relay_service,
            dial=DialPolicy(loopback=True, local=True),
            direct=direct,
        ),
        identity=identity,
        authority=MembershipVerifier(operator.public_key, run_id),
        membership=membership,
        deny=EMPTY_DENY_LIST,
        clock=clock,
        timeout=timeout,
    )
    host.handle(_HELLO, _nothing)
    return host


async def start_member(
    folder: Path, index: int, contacts: Sequence[list[str]], *, run_id: str, address: str, direct: bool
) -> SwarmHost:
    """Member `index` of a benchmark in a lab: the first is everybody's seed. Raises as `SwarmHost.start`."""
    host = await start_host(
        folder,
        f"member-{index}",
        tuple(contacts[0] or ()),
        run_id=run_id,
        relay_service=index == 0,
        address=address,
        direct=DirectConfig((address,)) if direct else None,
    )
    await host.ready()
    return host


async def greet_all(host: SwarmHost, contacts: Sequence[list[str]]) -> None:
    """Connect with the members at these addresses, as rounds do long before they exchange anything.

    Those before us in the list are dialled; the others dial us.
    """
    before_us = True
    for addresses in contacts:
        peer = peer_of(addresses)
        if peer == host.peer_id:
            before_us = False
            continue
        host.learn_addresses(peer, addresses)
        for attempt in range(_TRIES if before_us else 0):
            try:
                stream = await host.open(peer, _HELLO, _GREETING)
                await stream.close()
                break
            except AtollError:
                if attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(0.3 * (attempt + 1))


def peer_of(addresses: list[str]) -> str:
    """Whose addresses these are."""
    return addresses[0].rpartition("/p2p/")[2]


async def _nothing(stream: Stream) -> None:
    """Who opens this only wants to be connected."""
