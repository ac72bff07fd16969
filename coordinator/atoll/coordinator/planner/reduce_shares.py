"""Reduce shares: the part of the vector that each node sums in an outer round, from reported uplinks. Pure.

A node that reduces a share s of the vector sends the other shares to their reducers and the average of its own share to
all: 1 + s·(N − 2) vectors in total. The exchange takes as long as the slowest (1 + s·(N − 2)) / uplink, and the best
shares make that equal for all reducers. A node reduces nothing if sending its own contribution alone takes longer than
the exchange of the others. A node that others cannot dial only contributes.

Nodes report their own uplinks. While enough nodes can be dialled, no node gets more than twice an equal share, so an
exaggerated report gains little. No node counts as slower than 64 KiB/s.
"""

from __future__ import annotations

import ipaddress
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_SHARE_FACTOR = 2.0  # × an equal share
MIN_RESHARE_SPEEDUP = 1.25  # a smaller speedup does not justify a new plan
MIN_LINK_BYTES_PER_SECOND = 64 * 1024.0  # slower reports are raised to this
EQUAL_SHARE_BYTES_PER_SECOND = 125_000_000  # 1 Gbit/s: the reduce rate that a plan gives an equal share
MAX_UPLINK_BYTES_PER_SECOND = 1e12  # higher reports are lowered to this
_HALVINGS = 60


@dataclass(frozen=True)
class NodeLink:
    """A node's report of its link."""

    uplink: float = 0.0  # bytes per second; 0: not measured yet
    outbound_only: bool = False  # others cannot dial it


def best_shares(links: Mapping[str, NodeLink]) -> dict[str, float]:
    """Shares, by peer id, that give the shortest exchange among these nodes (at least one); they sum to 1."""
    uplinks, count = _uplinks(links), len(links)
    dialable = [peer for peer, link in links.items() if not link.outbound_only] or list(links)
    most = {peer: max(MAX_SHARE_FACTOR / count, 1 / len(dialable)) if peer in dialable else 0.0 for peer in links}
    if count <= 2 or len(dialable) == 1:  # with two nodes the traffic does not depend on the shares
        return {peer: (peer in dialable) / len(dialable) for peer in links}

    def shares(seconds: float) -> dict[str, float]:
        """Share that each node can reduce in that many seconds per byte."""
        spare = {peer: (seconds * uplinks[peer] - 1) / (count - 2) for peer in links}
        return {peer: min(max(spare[peer], 0.0), most[peer]) for peer in links}

    low, high = 0.0, count / min(uplinks.values())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if math.fsum(shares(middle).values()) >= 1 else (middle, high)
    found = shares(high)
    total = math.fsum(found.values())
    return {peer: share / total for peer, share in found.items()}


def exchange_seconds_per_byte(
    links: Mapping[str, NodeLink], shares: Mapping[str, float], among: Collection[str] = ()
) -> float:
    """Least seconds per byte of the vector until the nodes `among` (default: all) have sent their parts.

    Infinite if a node that cannot be dialled has a share although another node can be dialled.
    """
    uplinks, count = _uplinks(links), len(links)
    stuck = any(link.outbound_only and shares.get(peer, 0.0) for peer, link in links.items())
    if stuck and not all(link.outbound_only for link in links.values()):
        return math.inf
    return max((1 + shares.get(peer, 0.0) * max(0, count - 2)) / uplinks[peer] for peer in among or links)


def reshare_speedup(links: Mapping[str, NodeLink], planned: Mapping[str, int]) -> float:
    """Speedup of the best shares over those in proportion to `planned` (reduce rates by peer id).

    Only reducers are compared: a node that is slow with its own vector is slow with any shares, and the round may
    continue without it.
    """
    total, best = sum(planned.get(peer, 0) for peer in links), best_shares(links)
    now = {peer: planned.get(peer, 0) / total if total else 1 / len(links) for peer in links}
    reducers = [peer for peer in links if now[peer] or best[peer]]
    return exchange_seconds_per_byte(links, now, reducers) / exchange_seconds_per_byte(links, best, reducers)


def reduce_rate(share: float, holders: int) -> int:
    """Reduce rate that a plan gives a share among so many holders, in bytes per second."""
    return round(share * holders * EQUAL_SHARE_BYTES_PER_SECOND)


def span_rates(links: Mapping[str, NodeLink], spans: Mapping[str, range], weights: Sequence[float]) -> dict[str, int]:
    """Reduce rates of nodes with different `spans`: the mean over a node's layers, each among its holders.

    `weights` are the layers' sizes. Every layer has a holder.
    """
    total = dict.fromkeys(spans, 0.0)
    for segment, holders in segments(spans):
        found, weight = best_shares({peer: links[peer] for peer in holders}), _weight(segment, weights)
        for peer in holders:
            total[peer] += found[peer] * len(holders) * weight / _weight(spans[peer], weights)
    return {peer: reduce_rate(share, 1) for peer, share in total.items()}


def span_reshare_speedup(
    links: Mapping[str, NodeLink], spans: Mapping[str, range], planned: Mapping[str, int]
) -> float:
    """Largest `reshare_speedup` of any segment (layers with the same holders)."""
    return max(reshare_speedup({peer: links[peer] for peer in holders}, planned) for _, holders in segments(spans))


def segments(spans: Mapping[str, range]) -> list[tuple[range, tuple[str, ...]]]:
    """Split the layers into runs with the same holders; returns each run with its holders, sorted."""
    ends = sorted({end for span in spans.values() for end in (span.start, span.stop)})
    return [
        (range(start, stop), tuple(sorted(peer for peer, span in spans.items() if start in span)))
        for start, stop in pairwise(ends)
    ]


def _weight(layers: range, weights: Sequence[float]) -> float:
    return math.fsum(weights[layer] for layer in layers) or 1.0


def _uplinks(links: Mapping[str, NodeLink]) -> dict[str, float]:
    """Uplinks by peer id; a node without a measurement gets the median."""
    known = [max(link.uplink, MIN_LINK_BYTES_PER_SECOND) for link in links.values() if link.uplink]
    usual = statistics.median(known) if known else 1.0
    return {peer: max(link.uplink, MIN_LINK_BYTES_PER_SECOND) if link.uplink else usual for peer, link in links.items()}


def needs_relay(multiaddrs: Iterable[str]) -> bool:
    """True if others cannot dial a node with these addresses.

    A node behind NAT has relay addresses and addresses of its own network, which no node outside can dial.
    """
    relayed = direct = False
    for address in multiaddrs:
        words = address.split("/")
        if "p2p-circuit" in words:
            relayed = True
        elif words[1:2] not in (["ip4"], ["ip6"]) or _is_public("".join(words[2:3])):
            direct = True
    return relayed and not direct


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False
