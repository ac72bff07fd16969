"""All that members of a simulated run ever promised, voted, contributed and committed, and what must hold of it.

An entry that breaks an invariant raises `Violation` at once:

- one manifest per round: no two members ever install different results for one number;
- votes: nobody votes for two results in one ballot, or in a ballot below its promise;
- no contribution counts twice: snapshots of one node in committed rounds never overlap.
"""

from collections.abc import Iterable

from support.machine_plans import GENESIS

from atoll.core.manifest import Head, changed_layers
from atoll.core.plan import Plan
from atoll.core.quorum import Ballot, VoteRecord
from atoll.core.round_id import RoundId

Span = tuple[int, int]  # of the tokens that one life of a node trained: from, to


class Violation(AssertionError):
    """An invariant of the protocol is broken."""


class InvariantChecker:
    """What happened, for everyone."""

    def __init__(self, peers: Iterable[str]) -> None:
        self.committed: dict[int, Head] = {}
        self.installed: dict[str, list[Head]] = {peer: [] for peer in peers}
        self.votes: dict[tuple[str, int, Ballot], bytes] = {}
        self._promises: dict[tuple[str, int], Ballot] = {}
        self._contributed: dict[tuple[RoundId, str], tuple[int, Span]] = {}  # → incarnation, tokens
        self._counted: dict[tuple[str, int, int], list[Span]] = {}  # by life and layer

    def pledge(self, peer: str, record: VoteRecord) -> None:
        """`peer` promises, and perhaps votes; with an incomplete record it does neither."""
        if not record.complete:
            return
        key = (peer, record.number)
        if record.promised < self._promises.get(key, record.promised):
            raise Violation(f"{peer} went back on its promise for round {record.number}")
        self._promises[key] = record.promised
        if record.voted is not None:
            cast = self.votes.setdefault((peer, record.number, record.voted.ballot), record.voted.payload)
            if cast != record.voted.payload:
                raise Violation(f"{peer} voted twice in round {record.number}")

    def contribute(self, round_id: RoundId, peer: str, incarnation: int, tokens: Span) -> None:
        """That life of `peer` brings its snapshot into an exchange."""
        self._contributed[round_id, peer] = incarnation, tokens

    def install(self, peer: str, head: Head, plan: Plan) -> None:
        """`peer` takes `head` for committed; `plan` says which history counts."""
        if plan.accepts(head):
            if head.round not in self.committed:
                self.committed[head.round] = head
                self._count(head)
            elif self.committed[head.round].hash != head.hash:
                raise Violation(f"two results for round {head.round}")
        self.installed[peer].append(head)

    def holds_snapshot(self, head: Head, peer: str, incarnation: int) -> bool | None:
        """Whether what that life of `peer` trained is part of `head`; None: it took part with nothing."""
        made = self._contributed.get((RoundId.from_proto(head.manifest.round), peer))
        weights = [item.weight for item in head.manifest.contributions if item.peer_id == peer]
        if weights == [0]:
            return None
        return bool(weights) and made is not None and made[0] == incarnation

    def recover(self, newest: int) -> None:
        """The operator goes on from round `newest`: later ones, and all votes, are void."""
        kept = [self.committed[number] for number in sorted(self.committed) if number <= newest]
        self.committed, self._counted = {}, {}
        for head in kept:
            self.committed[head.round] = head
            self._count(head)
        self._promises, self.votes = {}, {}

    def _count(self, head: Head) -> None:
        """Enter a newly committed round."""
        previous = self.committed.get(head.round - 1, GENESIS)
        if head.round > 1 and head.manifest.previous_hash != previous.hash:
            raise Violation(f"round {head.round} does not follow round {head.round - 1}")
        round_id = RoundId.from_proto(head.manifest.round)
        for item in head.manifest.contributions:
            made = self._contributed.get((round_id, item.peer_id))
            if made is None or not item.weight:
                continue
            incarnation, (start, end) = made
            for layer in changed_layers(head.manifest):
                spans = self._counted.setdefault((item.peer_id, incarnation, layer), [])
                if any(start < other_end and other_start < end for other_start, other_end in spans):
                    raise Violation(f"round {head.round} counts tokens of {item.peer_id} twice")
                spans.append((start, end))
