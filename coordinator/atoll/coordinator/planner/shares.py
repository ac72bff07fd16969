"""Who reduces how much of the vector, from what nodes measured of their links. Pure.

Who reduces a share s of the vector sends the other shares to their reducers and the average of its own to everybody:
1 + s·(N − 2) vectors in all. So the exchange takes as long as the slowest of (1 + s·(N − 2)) / uplink, and the best
shares make that equal for all who reduce; who is too slow even for its own vector reduces nothing. A node that others
cannot dial only contributes.

Uplinks are the nodes' own words. Nobody is given more than twice an equal share, so that a boast gains little.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

MOST = 2.0  # of an equal share
WORTH = 1.25  # times as fast: new shares for less are not worth a new plan
_HALVINGS = 60


@dataclass(frozen=True)
class Link:
    """What a node says of its link."""

    uplink: float = 0.0  # bytes per second; 0: not measured yet
    outbound_only: bool = False  # others cannot dial it


def best_shares(links: Mapping[str, Link]) -> dict[str, float]:
    """The shares, by peer id, that let an exchange among these nodes (at least one) end first; they sum to 1."""
    uplinks, count = _uplinks(links), len(links)
    dialled = [peer for peer, link in links.items() if not link.outbound_only] or list(links)
    most = {peer: max(MOST / count, 1 / len(dialled)) if peer in dialled else 0.0 for peer in links}
    if count <= 2 or len(dialled) == 1:  # two send as much whatever they reduce
        return {peer: (peer in dialled) / len(dialled) for peer in links}

    def shares(seconds: float) -> dict[str, float]:
        """What everybody can reduce in that time a vector."""
        spare = {peer: (seconds * uplinks[peer] - 1) / (count - 2) for peer in links}
        return {peer: min(max(spare[peer], 0.0), most[peer]) for peer in links}

    low, high = 0.0, count / min(uplinks.values())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if math.fsum(shares(middle).values()) >= 1 else (middle, high)
    found = shares(high)
    total = math.fsum(found.values())
    return {peer: share / total for peer, share in found.items()}


def vector_seconds(links: Mapping[str, Link], shares: Mapping[str, float]) -> float:
    """How long an exchange takes at least, for each byte of the vector; infinite where somebody whom nobody can dial
    has a share that another could have.
    """
    uplinks, count = _uplinks(links), len(links)
    stuck = any(link.outbound_only and shares.get(peer, 0.0) for peer, link in links.items())
    if stuck and not all(link.outbound_only for link in links.values()):
        return math.inf
    return max((1 + shares.get(peer, 0.0) * max(0, count - 2)) / uplinks[peer] for peer in links)


def gain(links: Mapping[str, Link], planned: Mapping[str, int]) -> float:
    """How many times as fast the best shares are as those in proportion to `planned` (reduce rates by peer id)."""
    total = sum(planned.get(peer, 0) for peer in links)
    now = {peer: planned.get(peer, 0) / total if total else 1 / len(links) for peer in links}
    return vector_seconds(links, now) / vector_seconds(links, best_shares(links))


def _uplinks(links: Mapping[str, Link]) -> dict[str, float]:
    """With the median for those who measured nothing yet."""
    known = [link.uplink for link in links.values() if link.uplink > 0]
    usual = statistics.median(known) if known else 1.0
    return {peer: link.uplink or usual for peer, link in links.items()}
