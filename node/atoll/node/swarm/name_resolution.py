"""NameResolution: turns multiaddrs with host names into multiaddrs with IP addresses that may be dialled.

p2pd itself would resolve the names and dial any address.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hivemind.utils.multiaddr import Multiaddr

from atoll.node.direct.dial_policy import DialPolicy, is_name
from atoll.node.swarm.addresses import parse

MAX_NAMES = 4  # of one peer
MAX_ADDRESSES = 8  # of one name
RESOLVE_TIMEOUT = timedelta(seconds=3)
_THREADS = 8
_FAMILIES = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}


class NameResolution:
    """Resolves names on separate threads, so that names that never resolve do not stop others."""

    def __init__(self, policy: DialPolicy) -> None:
        self._policy = policy
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="names")

    async def resolve(self, peer_id: str, multiaddrs: tuple[Multiaddr, ...]) -> tuple[Multiaddr, ...]:
        """Return the multiaddrs that p2pd may dial; names that do not resolve in time are left out."""
        texts = [str(address) for address in multiaddrs]
        named = [text for text in texts if is_name(text)][:MAX_NAMES]
        if not named:
            return multiaddrs
        kept = [address for address, text in zip(multiaddrs, texts, strict=True) if not is_name(text)]
        for found in await asyncio.gather(*(self._addresses(text) for text in named)):
            kept += [parsed for text in found if (parsed := parse(text, peer_id)) is not None]
        return tuple(kept)

    def close(self) -> None:
        """Stop resolving."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _addresses(self, multiaddr: str) -> list[str]:
        _, kind, name, *rest = multiaddr.split("/")
        family = _FAMILIES.get(kind, socket.AF_UNSPEC)
        found: list[Any] = []
        with suppress(TimeoutError, OSError, UnicodeError):
            async with asyncio.timeout(RESOLVE_TIMEOUT.total_seconds()):
                found = await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, name, family)
        hosts = dict.fromkeys(str(address[0]) for *_, address in found)
        texts = ["/".join(("", "ip6" if ":" in host else "ip4", host, *rest)) for host in hosts]
        return [text for text in texts if self._policy.allows(text)][:MAX_ADDRESSES]


def _look_up(name: str, family: int) -> list[Any]:
    return socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
