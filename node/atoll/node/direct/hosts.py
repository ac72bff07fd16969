"""Where a peer may be dialled directly: IP addresses and host names out of multiaddrs. Pure."""

from __future__ import annotations

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
