"""Who decides a round, and what was decided before: the arithmetic of votes. Pure.

Round n+1 is decided by the members that were present when round n was settled, its *electorate*. A result commits
with the votes of a strict majority of them; of an even electorate, exactly half suffice together with the
coordinator's tie-break. Any two such quorums share a voter: two majorities share a member, so do a majority and a
half, and two halves share the coordinator.

Attempts are ballots of single-decree Paxos (Lamport, "Paxos Made Simple", 2001): a member that takes part in one
promises to ignore earlier ones, and says what it voted for last. `must_adopt` is the proposer's rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple


class Ballot(NamedTuple):
    """An attempt as votes see it: attempts under a newer plan come after all of an older one."""

    plan_version: int
    attempt: int


@dataclass(frozen=True)
class Electorate:
    """The members that decide one round."""

    members: frozenset[str]

    def decides(self, votes: Set[str], tie_break: bool = False) -> bool:
        """Whether `votes` (peer ids, others than members are ignored) commit a result."""
        double = 2 * len(self.members & votes)
        return double > len(self.members) or (tie_break and self.is_half(votes))

    def is_half(self, votes: Set[str]) -> bool:
        """Whether the coordinator's vote would make `votes` enough."""
        return 0 < 2 * len(self.members & votes) == len(self.members)


@dataclass(frozen=True)
class LastVote:
    """What a voter voted for last at this round number."""

    ballot: Ballot
    payload: bytes


class Undecided(Exception):
    """Two different results may have been committed as far as these answers tell; more answers are needed."""


def must_adopt(
    electorate: Electorate,
    promised: Mapping[str, LastVote | None],
    tie_break_promised: bool = False,
    tie_break_voted: LastVote | None = None,
) -> bytes | None:
    """The earlier result that a new attempt has to commit, or None when it is free to compute another.

    `promised` are the members that will not vote in earlier attempts any more, with their last votes. The result of
    the highest ballot must be adopted if those who voted for it, and those who did not promise, could be a quorum:
    then it may be committed already. (If any lower one had been committed, the proposer of the highest had adopted
    it.) Raises `Undecided` when replicas computed different results in that ballot and both could be.
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
    """What this node promised and voted for one round number. On disk before anyone hears of it."""

    number: int
    head_hash: bytes  # the manifest that the round builds on
    promised: Ballot  # no votes in earlier attempts
    voted: LastVote | None = None
