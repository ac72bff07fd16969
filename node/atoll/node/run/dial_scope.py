"""Which addresses this node may dial, from its configuration and its swarm (`direct/dial_policy.py`)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from atoll.core import log
from atoll.core.tokens import split_endpoint
from atoll.node.config import NodeConfig
from atoll.node.control.credentials import Credentials
from atoll.node.direct.dial_policy import DialPolicy, parse_ranges

_log = log.get("daemon")


async def dial_policy(config: NodeConfig, credentials: Credentials) -> DialPolicy:
    """Build the policy. Resolves the coordinator's name, because a private address there allows private addresses."""
    host = split_endpoint(credentials.coordinator)[0]
    policy = DialPolicy.for_swarm(
        await asyncio.to_thread(_addresses_of, host),
        credentials.seeds,
        parse_ranges(config.dial_ranges),
        (config.port, config.direct_port),
    )
    _log.info("addresses to dial", this_machine=policy.loopback, private=policy.local, ranges=config.dial_ranges)
    return policy


def _addresses_of(host: str) -> tuple[str, ...]:
    try:
        return (str(ipaddress.ip_address(host)),)
    except ValueError:
        pass
    try:
        return tuple({str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as error:
        _log.warning("the coordinator's name does not resolve", host=host, reason=str(error))
        return ()
