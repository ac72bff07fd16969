"""Joins a run's swarm, on the ports of the last start and through the seeds of the credentials."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import PortInUse
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.node.config import NodeConfig
from atoll.node.control.credentials import Credentials
from atoll.node.direct.direct_path import DirectConfig
from atoll.node.run.dial_scope import dial_policy
from atoll.node.swarm.host import SwarmConfig, SwarmHost
from atoll.node.system.remembered_ports import DIRECT_PORT_FILE, port_in, remember_port, remembered_port

START_TIMEOUT = timedelta(seconds=60)

_log = log.get("daemon")


@dataclass(frozen=True)
class Joining:
    """Everything that a node needs to join."""

    config: NodeConfig
    identity: Identity
    credentials: Credentials
    clock: Clock
    is_seed: bool

    async def join(self, *, seeds_optional: bool) -> SwarmHost:
        """Join on the port of the last start, if it is free: other members remember that address.

        `seeds_optional`: continue if no seed answers. Only a node's first start must reach one.
        """
        config = self.config
        ports = [config.port] if config.port else [*remembered_port(config.data_dir), 0]
        for port in ports:
            try:
                host = await self._start_host(port, seeds_optional)
                break
            except PortInUse:
                if port == ports[-1]:
                    raise
        if not self.credentials.seeds and not self.is_seed:
            _log.warning(
                "run has no seed: nodes cannot find each other, so this node trains alone until a seed joins",
                remedy="the operator creates a token for a seed: atollctl token create --role seed",
            )
        remember_port(config.data_dir, port_in(host.multiaddrs()))
        remember_port(config.data_dir, host.direct_port, DIRECT_PORT_FILE)
        _log.info("joined the swarm", peer_id=self.identity.peer_id, addresses=list(host.multiaddrs()))
        return host

    async def _start_host(self, port: int, seeds_optional: bool) -> SwarmHost:
        config, credentials = self.config, self.credentials
        return await SwarmHost.start(
            SwarmConfig(
                identity_path=config.path("identity.key"),
                runtime_dir=make_private_dir(config.path("run")),
                listen=(_multiaddr(config.listen, port),),
                announce=(_multiaddr(config.announce, port),) if config.announce else (),
                seeds=credentials.seeds,
                relay_service=self.is_seed,
                dial=await dial_policy(config, credentials),
                seeds_optional=seeds_optional,
                direct=_direct_config(config) if config.direct else None,
            ),
            identity=self.identity,
            authority=credentials.authority,
            membership=credentials.signed_membership(),
            deny=credentials.verified_deny_list(),
            clock=self.clock,
            timeout=START_TIMEOUT,
        )


def _direct_config(config: NodeConfig) -> DirectConfig:
    remembered = [*remembered_port(config.data_dir, DIRECT_PORT_FILE), 0]
    return DirectConfig((config.listen,), (config.direct_port,) if config.direct_port else tuple(remembered))


def _multiaddr(host: str, port: int) -> str:
    kind = "ip6" if ":" in host else "ip4" if host.replace(".", "").isdigit() else "dns4"
    return f"/{kind}/{host}/tcp/{port}"
