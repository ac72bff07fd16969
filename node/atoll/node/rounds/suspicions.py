"""Members whose sums or sketches failed an audit, and what an opener concludes. Pure.

An audit (exchange/audit.py) shows that a reducer's average is not the sum of what contributors say that they sent. If
the average fits without one contributor's report, either that contributor or the reducer lies. After a first dispute
the reducer no longer sums; it loses nothing else. A contributor whose report alone contradicts a second reducer is the
liar, unless both reducers lie. That contributor is left out, and these reducers sum again.

Suspicions belong to this node and end after some rounds. They do not bind other members: those accept any Start that
keeps few holders from reducing, and audit the sums themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from atoll.node.exchange.auditor import Dispute

SUSPECTED_ROUNDS = 256
_MAX_DISPUTES = 1024


class Suspicions:
    """Disputes that this node found, newest last."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str | None], int] = {}  # (reducer, contributor) → round of the last dispute

    def note(self, disputes: Iterable[Dispute], round_number: int) -> None:
        """Remember what an audit found in one attempt."""
        for dispute in disputes:
            if dispute.reducer is None:
                continue
            pair = (dispute.reducer, dispute.contributor)
            self._rounds.pop(pair, None)
            self._rounds[pair] = round_number
        self._rounds = {
            pair: number
            for pair, number in list(self._rounds.items())[-_MAX_DISPUTES:]
            if number > round_number - SUSPECTED_ROUNDS
        }

    def liars(self, round_number: int) -> frozenset[str]:
        """Contributors that may not take part: each alone contradicted several reducers."""
        contradicted: defaultdict[str, set[str]] = defaultdict(set)
        for reducer, contributor in self._recent(round_number):
            if contributor is not None:
                contradicted[contributor].add(reducer)
        return frozenset(peer for peer, reducers in contradicted.items() if len(reducers) > 1)

    def poor_reducers(self, round_number: int) -> frozenset[str]:
        """Members that may not sum."""
        liars = self.liars(round_number)
        return frozenset(reducer for reducer, peer in self._recent(round_number) if peer not in liars)

    def _recent(self, round_number: int) -> list[tuple[str, str | None]]:
        return [pair for pair, number in self._rounds.items() if number > round_number - SUSPECTED_ROUNDS]
