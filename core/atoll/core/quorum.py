"""Who decides a round, how many votes commit it, and which earlier result a new attempt must propose. Pure.

Every committed manifest names the *seats* that decide the next round: up to seven members that were present, in the
order in which they may open it. Where that number is even, the coordinator has one more seat, so it is always odd. A
result commits with the votes of a strict majority of the seats. Any two majorities share a seat, so two results of one
round cannot both commit.

Each round is one instance of single-decree Paxos (Lamport, "Paxos Made Simple", 2001), and its acceptors are chosen by
the instance before it, as in §4 of "Reconfiguring a State Machine" (Lamport, Malkhi, Zhou, 2010) with α = 1: round n+1
begins only on a committed round n. An attempt is a ballot: its opener is the only proposer, and proposes at most one
result in it. `must_propose` is the proposer's rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atoll.v1 import dataplane_pb2 as dp

COORDINATOR = "coordinator"  # the name of its seat; no peer id looks like that
MAX_SEATS = 7  # of members
MARK_BYTES = 8
MARKS_KEPT = 4  # two are needed: that of the head, and that of the round which comes next


class Ballot(NamedTuple):
    """Order of an attempt in Paxos: all attempts under a newer plan are higher than those under an older one."""

    plan_version: int
    attempt: int


@dataclass(frozen=True)
class Electorate:
    """The seats that decide one round."""

    members: frozenset[str]

    def decides(self, votes: Iterable[str]) -> bool:
        """Return whether `votes` commit a result. Names without a seat are ignored."""
        return 2 * len(self.members.intersection(votes)) > len(self.members)


def next_seats(before: Iterable[str], present: Collection[str], ranked: Iterable[str]) -> tuple[str, ...]:
    """Return the seats of the next round, in the order of opening.

    Those of `before` that are `present` stay, in their order. The first of `ranked` get what is free. Raises
    `ValueError` if nobody is present.
    """
    if not present:
        raise ValueError("a round needs somebody who is present to decide the next one")
    seats = [peer for peer in dict.fromkeys([*before, *ranked]) if peer in present][:MAX_SEATS]
    return tuple(seats) if len(seats) % 2 else (*seats, COORDINATOR)


@dataclass(frozen=True)
class LastVote:
    """A seat's last vote at this round number."""

    ballot: Ballot
    proposal: bytes  # serialised `Proposal`

    @cached_property
    def payload(self) -> bytes:
        """The serialised manifest that it is for."""
        return dp.Proposal.FromString(self.proposal).payload


def must_propose(electorate: Electorate, promised: Mapping[str, LastVote | None]) -> LastVote | None:
    """Return the earlier vote whose result a new attempt must propose, or None if it may propose a new one.

    `promised` has the seats that promised not to vote in earlier attempts, with their last votes. All votes in the
    highest ballot are for one result. If any result was committed, it is that one, and whoever voted for it then voted
    for nothing else since. So it need not be proposed where those whose last vote is for it, in whichever ballot, and
    the seats that did not promise are no majority.
    """
    votes = {peer: vote for peer, vote in promised.items() if vote is not None}
    if not votes:
        return None
    highest = max(votes.values(), key=lambda vote: vote.ballot)
    agreed = {peer for peer, vote in votes.items() if vote.payload == highest.payload}
    silent: Set[str] = electorate.members - promised.keys()
    return highest if electorate.decides(silent | agreed) else None


class Promised(NamedTuple):
    """How far a node's promises and votes have come. Within one epoch they are ordered like this."""

    number: int  # of the round
    ballot: Ballot
    voted: bool = False  # in that ballot


@dataclass(frozen=True)
class VoteRecord:
    """This node's promise and vote at one round number. It is on disk before a peer hears of it.

    At every head a node draws a random mark, which the next manifest holds for it. So a record that does not know the
    mark of the head is not the newest one of its node.
    """

    number: int
    head_hash: bytes  # the manifest that the round builds on
    promised: Ballot  # this node does not vote in earlier attempts
    voted: LastVote | None = None
    marks: tuple[bytes, ...] = ()  # of the last rounds that this node took part in, the newest last
    complete: bool = True  # False: it may have voted at this round before, so it abstains

    @property
    def newest(self) -> Promised:
        """What a node has promised and voted for at most, if this is its record."""
        return Promised(self.number, self.promised, self.voted is not None and self.voted.ballot == self.promised)
