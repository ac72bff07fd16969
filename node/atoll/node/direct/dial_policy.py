"""DialPolicy: the addresses of peers that this node dials.

Members publish their own addresses, so a member could publish the address of a service in another member's network. A
node therefore dials global addresses only, and ports from 1024 on. A swarm in a lab or on a LAN has private addresses;
the addresses of its coordinator and seeds show that (`for_swarm`). An owner can allow more ranges. Host names are
checked by the addresses to which they resolve. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.core.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NAME_KINDS = ("dns", "dns4", "dns6")
FIRST_UNPRIVILEGED_PORT = 1024
_METADATA = frozenset(  # services of clouds that give credentials to any caller, and are not link-local
    ipaddress.ip_address(text) for text in ("168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254")
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True)
class DialPolicy:
    """Addresses that may be dialled in addition to global ones."""

    loopback: bool  # addresses of this machine
    local: bool  # private, shared and other addresses that are not routed on the internet
    ranges: tuple[Network, ...] = ()  # further private ranges that the owner allows
    low_ports: frozenset[int] = frozenset()  # ports below 1024

    @classmethod
    def for_swarm(
        cls, coordinator: Iterable[str], seeds: Iterable[str], ranges: tuple[Network, ...], ports: Iterable[int]
    ) -> DialPolicy:
        """The policy of a node that joined through `coordinator` (its IP addresses) and `seeds` (multiaddrs).

        A swarm is local if its coordinator has a local address, or if all addresses of its seeds are local.
        """
        seeds = tuple(seeds)
        joined = [address for text in coordinator if (address := _parse(text))]
        of_seeds = [address for text in seeds if (address := _parse(_host(text)))]
        loopback = any(address.is_loopback for address in joined)
        local = any(not address.is_global for address in joined)
        local = local or (len(of_seeds) == len(seeds) > 0 and not any(address.is_global for address in of_seeds))
        low = {port for port in (*ports, *map(_port, seeds)) if 0 < port < FIRST_UNPRIVILEGED_PORT}
        return cls(loopback, local, ranges, frozenset(low))

    def allows_host(self, host: str) -> bool:
        """Return whether `host` is an IP address that may be dialled; False for a name."""
        address = _parse(host)
        if address is None or address in _METADATA or address.is_multicast or address.is_unspecified:
            return False
        if any(address in network for network in self.ranges):
            return True
        if address.is_link_local or (address.is_reserved and not address.is_loopback):
            return False
        if address.is_loopback:
            return self.loopback
        return self.local or address.is_global

    def allows_port(self, port: int) -> bool:
        """Return whether this TCP port of a peer may be dialled."""
        return FIRST_UNPRIVILEGED_PORT <= port < 65536 or port in self.low_ports

    def allows(self, multiaddr: str) -> bool:
        """Return whether a TCP multiaddr may be dialled, also through a relay. A name must be resolved first."""
        words = multiaddr.split("/")
        if len(words) < 5 or words[0] or words[3] != "tcp" or not self.allows_port(_port(multiaddr)):
            return False
        if not _is_peer_or_circuit(words[5:]):
            return False
        return bool(words[2]) if words[1] in NAME_KINDS else words[1] in ("ip4", "ip6") and self.allows_host(words[2])


def parse_ranges(text: str) -> tuple[Network, ...]:
    """Parse ranges such as `192.168.1.0/24,fd00::/8`. Raises `ConfigError`."""
    try:
        return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a list of address ranges: {error}", "write 192.168.1.0/24,fd00::/8"
        ) from error


def is_name(multiaddr: str) -> bool:
    """Return whether a multiaddr contains a host name instead of an IP address."""
    return multiaddr.split("/")[1:2] in [[kind] for kind in NAME_KINDS]


def _is_peer_or_circuit(words: list[str]) -> bool:
    """Return whether these are the end of a multiaddr: `/p2p/<id>`, `/p2p/<id>/p2p-circuit[/p2p/<id>]`, or nothing."""
    return [words[0:1], words[2:3], words[3:4]] in (
        [[], [], []],
        [["p2p"], [], []],
        [["p2p"], ["p2p-circuit"], []],
        [["p2p"], ["p2p-circuit"], ["p2p"]],
    ) and len(words) in (0, 2, 3, 5)


def _host(multiaddr: str) -> str:
    return (multiaddr.split("/") + [""] * 3)[2]


def _port(multiaddr: str) -> int:
    text = (multiaddr.split("/") + [""] * 5)[4]
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 0


def _parse(host: str) -> Address | None:
    """The IP address that packets to `host` reach.

    For IPv6 forms that contain an IPv4 address, it is the IPv4 address.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.scope_id is not None:
        return ipaddress.IPv6Address("fe80::")  # an address with a zone is link-local
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else address)
