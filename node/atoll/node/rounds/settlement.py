"""What the round's average is, decided from what every member says it has. Pure.

Reducers may have died after some members received a part and before others did, or lied and sent different bytes to
different members. The opener settles on one digest for every part; who lacks those bytes fetches them from who has
them. A part that nobody has is a zero update for everyone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from atoll.core.errors import PeerMisbehaved

DIGEST_BYTES = 32


class PartsReport(Protocol):
    """What one member has; `dataplane.Parts` is one, `allreduce.ExchangeResult` too."""

    @property
    def digests(self) -> Sequence[bytes]:
        """SHA-256 of every part's encoded bytes, in the order of the vector; empty: missing."""
        ...

    @property
    def partial(self) -> Sequence[str]:
        """Contributors that are only in some of this member's sums."""
        ...


def check_report(peer: str, report: PartsReport, parts_total: int) -> None:
    """Raise `PeerMisbehaved` unless there is one digest, or an empty one, for each of the parts."""
    if len(report.digests) != parts_total:
        raise PeerMisbehaved(f"{peer} reports {len(report.digests)} parts; the vector has {parts_total}")
    if any(len(digest) not in (0, DIGEST_BYTES) for digest in report.digests):
        raise PeerMisbehaved(f"{peer} reports a digest that is none")


def settle(
    reports: Mapping[str, PartsReport], order: Sequence[str]
) -> tuple[tuple[bytes, ...], dict[int, tuple[str, ...]], tuple[str, ...]]:
    """Digests, holders and partial contributors from the reports of the members in `order` (all that are present).

    Digests: of every part, the one that most members have, of several the lowest; empty when nobody has the part.
    Holders: for each part that a member lacks or has differently, who can give it, in `order`. Raises
    `PeerMisbehaved` when reports do not fit each other; `check_report` finds the culprit beforehand.
    """
    parts_total = len(reports[order[0]].digests)
    for peer in order:
        check_report(peer, reports[peer], parts_total)
    digests = tuple(_winner(reports[peer].digests[index] for peer in order) for index in range(parts_total))
    holders: dict[int, tuple[str, ...]] = {}
    for index, digest in enumerate(digests):
        having = tuple(peer for peer in order if reports[peer].digests[index] == digest)
        if digest and len(having) < len(order):
            holders[index] = having
    return digests, holders, tuple(sorted({name for peer in order for name in reports[peer].partial}))


def _winner(digests: Iterable[bytes]) -> bytes:
    votes = Counter(digest for digest in digests if digest)
    return min(votes, key=lambda digest: (-votes[digest], digest), default=b"")
