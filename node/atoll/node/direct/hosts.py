"""Hosts for direct dialling: IP addresses and host names taken from a peer's multiaddrs. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")


def hosts_in(multiaddrs: Iterable[str], limit: int) -> tuple[str, ...]:
    """Return at most `limit` different hosts of TCP multiaddrs.

    Relayed ones are left out: their host is the relay's.
    """
    found: dict[str, None] = {}
    for text in multiaddrs:
        words = text.split("/")
        if len(words) >= 5 and words[1] in _KINDS and words[3] == "tcp" and words[2] and "p2p-circuit" not in words:
            found.setdefault(words[2])
    return tuple(found)[:limit]


def is_ip_address(host: str) -> bool:
    """Return whether `host` is an IP address in standard notation, not a name or another spelling of a number."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
