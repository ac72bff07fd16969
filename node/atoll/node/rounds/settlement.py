"""Decides the round's average from the parts that every member reports. Pure.

Reducers may have died after some members received a part and before others did, or lied and sent different bytes to
different members. The opener settles on one digest for every part. A member that lacks those bytes fetches them from a
member that has them. A part that nobody has is a zero update for everyone.

`Settle` must fit into one message however many members and parts there are. So it never lists who holds which part: it
lists the members that hold everything. Where these are fewer than eight, it also lists up to three of the other holders
of each part that is lacking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from atoll.core.errors import PeerMisbehaved
from atoll.v1 import dataplane_pb2 as dp

DIGEST_BYTES = 32
NONCE_BYTES = 16
MAX_HOLDERS = 3  # listed for one part
_MAX_SOURCES = 8  # members that are asked for one part


class PartsReport(Protocol):
    """The parts that one member reports: `dataplane.Parts` or `allreduce.ExchangeResult`."""

    @property
    def digests(self) -> Sequence[bytes]:
        """SHA-256 of every part's encoded bytes, in the order of the vector; empty: missing."""
        ...


@dataclass(frozen=True)
class Settlement:
    """The settled digests, and which members have the parts."""

    digests: tuple[bytes, ...]  # of every part: what most members have, the lowest in a tie; empty: no member has it
    whole: tuple[str, ...]  # members that hold every part as settled
    sources: tuple[str, ...]  # the whole members that serve parts to others: not on probation, if there are such
    holders: Mapping[int, tuple[str, ...]]  # part that a member lacks → up to three holders, if few members are whole
    is_complete: bool  # every member holds every part as settled, and there is no part that nobody holds


def check_report(peer: str, report: PartsReport, parts_total: int) -> None:
    """Raise `PeerMisbehaved` unless there is one digest, or an empty one, for each of the parts."""
    if len(report.digests) != parts_total:
        raise PeerMisbehaved(f"{peer} reports {len(report.digests)} parts; the vector has {parts_total}")
    if any(len(digest) not in (0, DIGEST_BYTES) for digest in report.digests):
        raise PeerMisbehaved(f"{peer} reports a digest that has neither 0 nor {DIGEST_BYTES} bytes")


def settle(
    reports: Mapping[str, PartsReport], order: Sequence[str], on_probation: Set[str] = frozenset()
) -> Settlement:
    """Settle from the reports of the members in `order` (all that are present).

    Reports of members on probation count only if there are no others. Raises `PeerMisbehaved` when reports do not fit
    each other; `check_report` finds the culprit beforehand.
    """
    parts_total = len(reports[order[0]].digests)
    for peer in order:
        check_report(peer, reports[peer], parts_total)
    columns = {peer: list(reports[peer].digests) for peer in order}
    counted = [peer for peer in order if peer not in on_probation] or order
    digests = tuple(_most_held(columns[peer][index] for peer in counted) for index in range(parts_total))
    whole = tuple(peer for peer in order if columns[peer] == list(digests))
    holders: dict[int, tuple[str, ...]] = {}
    sources = tuple(peer for peer in whole if peer not in on_probation) or whole
    if len(sources) < min(_MAX_SOURCES, len(order)):
        others = [peer for peer in order if peer not in whole]
        for index, digest in enumerate(digests):
            having = [peer for peer in others if columns[peer][index] == digest]
            if digest and len(having) < len(others) and having:
                having = [peer for peer in having if peer not in on_probation] or having
                first = index % len(having)  # so that members share the work of giving
                holders[index] = tuple((having[first:] + having[:first])[:MAX_HOLDERS])
    return Settlement(digests, whole, sources, holders, len(whole) == len(order) and all(digests))


class RepairSources:
    """The members to ask for a part, from `settle` and the member numbers of `start`."""

    def __init__(self, start: dp.Start, settle: dp.Settle) -> None:
        self._members = [item.peer_id for item in start.contributions]
        self._whole = list(settle.whole)
        self._listed = {repair.part: list(repair.members) for repair in settle.repairs}

    def __call__(self, part: int) -> tuple[str, ...]:
        """Up to eight members that hold `part`. Different parts start at different members, to share the load."""
        first = part % len(self._whole) if self._whole else 0
        places = self._listed.get(part, []) + self._whole[first:] + self._whole[:first]
        return tuple(self._members[place] for place in places[:_MAX_SOURCES])


def _most_held(digests: Iterable[bytes]) -> bytes:
    votes = Counter(digest for digest in digests if digest)
    return min(votes, key=lambda digest: (-votes[digest], digest), default=b"")
