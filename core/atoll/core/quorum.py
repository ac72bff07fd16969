"""Vote counting: which votes commit a round, and which earlier result a new attempt must adopt. Pure.

The *electorate* of round n+1 is the members that were present when round n was settled. A result commits with the
votes of a strict majority of the electorate. Exactly half of an even electorate suffices together with the
coordinator's tie-break. Any two such quorums share a voter: two majorities share a member, a majority and a half
share a member, and two halves share the coordinator.

Attempts are ballots of single-decree Paxos (Lamport, "Paxos Made Simple", 2001). A member that takes part in an
attempt promises not to vote in earlier ones, and reports its last vote. `must_adopt` is the proposer's rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple


class Ballot(NamedTuple):
    """Order of an attempt in Paxos: all attempts under a newer plan are higher than those under an older one."""

    plan_version: int
    attempt: int


@dataclass(frozen=True)
class Electorate:
    """The members that decide one round."""

    members: frozenset[str]

    def decides(self, votes: Set[str], tie_break: bool = False) -> bool:
        """Return whether `votes` commit a result. Peer ids outside the electorate are ignored."""
        double = 2 * len(self.members & votes)
        return double > len(self.members) or (tie_break and self.is_half(votes))

    def is_half(self, votes: Set[str]) -> bool:
        """Return whether `votes` are exactly half, so that the coordinator's vote makes a quorum."""
        return 0 < 2 * len(self.members & votes) == len(self.members)


@dataclass(frozen=True)
class LastVote:
    """A voter's last vote at this round number."""

    ballot: Ballot
    payload: bytes


class Undecided(Exception):
    """The answers allow that either of two different results was committed; more answers are needed."""


def must_adopt(
    electorate: Electorate,
    promised: Mapping[str, LastVote | None],
    tie_break_promised: bool = False,
    tie_break_voted: LastVote | None = None,
) -> bytes | None:
    """Return the earlier result that a new attempt must commit, or None if it may compute a new one.

    `promised` has the members that promised not to vote in earlier attempts, with their last votes. The result of the
    highest ballot must be adopted if its voters and the members that did not promise could be a quorum: it may be
    committed already. A committed result of a lower ballot would have been adopted in the highest. Raises `Undecided`
    if members voted for different results in that ballot and more than one of them may be committed.
    """
    votes = [vote for vote in (*promised.values(), tie_break_voted) if vote is not None]
    if not votes:
        return None
    highest = max(vote.ballot for vote in votes)
    silent = electorate.members - promised.keys()
    possible = []
    for payload in sorted({vote.payload for vote in votes if vote.ballot == highest}):
        agreed = {peer for peer, vote in promised.items() if vote is not None and vote.payload == payload}
        tie_break = not tie_break_promised or (tie_break_voted is not None and tie_break_voted.payload == payload)
        if electorate.decides(silent | agreed, tie_break):
            possible.append(payload)
    if len(possible) > 1:
        raise Undecided
    return possible[0] if possible else None


@dataclass(frozen=True)
class VoteRecord:
    """This node's promise and vote at one round number. It is on disk before a peer hears of it."""

    number: int
    head_hash: bytes  # the manifest that the round builds on
    promised: Ballot  # this node does not vote in earlier attempts
    voted: LastVote | None = None
