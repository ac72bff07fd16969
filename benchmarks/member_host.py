"""A member's presence in a swarm, for benchmarks that need hosts and no coordinator."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from atoll.core.clock import SystemClock
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY, Authority, issue_membership
from atoll.node.direct.path import DirectConfig
from atoll.node.swarm.host import SwarmConfig, SwarmHost

OPERATOR_KEY = "operator.key"


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
    return await SwarmHost.start(
        SwarmConfig(
            identity_path=folder / f"{name}.key",
            runtime_dir=folder / name,
            listen=(f"/ip4/{address}/tcp/0",),
            announce=(),
            seeds=seeds,
            relay_service=relay_service,
            direct=direct,
        ),
        identity=identity,
        authority=Authority(operator.public_key, run_id),
        membership=membership,
        deny=EMPTY_DENY,
        clock=clock,
        timeout=timeout,
    )
