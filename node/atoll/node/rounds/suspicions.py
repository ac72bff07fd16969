"""Members that audits found at odds, and what openers conclude from it. Pure.

An audit (exchange/audit.py) shows a member that a reducer's average is not the sum of what contributors say that they
sent. If the average fits without the word of one contributor, either of the two lies. So a first dispute
takes the reducing from the reducer: it loses nothing else. A contributor whose word alone contradicts a second reducer
is the liar, unless both reducers lie: it is left out, and these reducers sum again.

Suspicions are this node's own, and end after some rounds. They bind nobody else: members accept any Start that keeps
few holders from reducing, and audit the sums.
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
        """Contributors that shall take no part: each contradicted several reducers alone."""
        contradicted: defaultdict[str, set[str]] = defaultdict(set)
        for reducer, contributor in self._recent(round_number):
            if contributor is not None:
                contradicted[contributor].add(reducer)
        return frozenset(peer for peer, reducers in contradicted.items() if len(reducers) > 1)

    def poor_reducers(self, round_number: int) -> frozenset[str]:
        """Members that shall sum nothing."""
        liars = self.liars(round_number)
        return frozenset(reducer for reducer, peer in self._recent(round_number) if peer not in liars)

    def _recent(self, round_number: int) -> list[tuple[str, str | None]]:
        return [pair for pair, number in self._rounds.items() if number > round_number - SUSPECTED_ROUNDS]
