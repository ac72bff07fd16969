"""Where a peer may be dialled directly: IP addresses and host names out of multiaddrs. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")


def hosts_in(multiaddrs: Iterable[str], limit: int) -> tuple[str, ...]:
    """The hosts of TCP multiaddrs, each once; relayed ones name the relay's host and are left out."""
    found: dict[str, None] = {}
    for text in multiaddrs:
        words = text.split("/")
        if len(words) >= 5 and words[1] in _KINDS and words[3] == "tcp" and words[2] and "p2p-circuit" not in words:
            found.setdefault(words[2])
    return tuple(found)[:limit]


def is_ip_address(host: str) -> bool:
    """An IP address as programs write it, not a name and no other way to write a number."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def may_be_dialled(host: str, *, loopback: bool) -> bool:
    """An IP address that a peer can have. `loopback`: this machine's own count too, as all peers are on it."""
    if not is_ip_address(host):
        return False
    address = ipaddress.ip_address(host)
    if address.is_multicast or address.is_unspecified or address.is_link_local or address.is_reserved:
        return False
    return loopback or not address.is_loopback
