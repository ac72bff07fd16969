"""Who decides a round, how many votes commit it, and which earlier result a new attempt must propose. Pure.

Every committed manifest names the *seats* that decide the next round: up to seven members that were present, in the
order in which they may open it. If their number is even, the coordinator has one more seat, so the number of seats is
always odd. A result commits with the votes of a strict majority of the seats. Any two majorities share a seat, so two
results of one round cannot both commit.

Each round is one instance of single-decree Paxos (Lamport, "Paxos Made Simple", 2001). The previous instance chooses
its acceptors, as in §4 of "Reconfiguring a State Machine" (Lamport, Malkhi, Zhou, 2010) with α = 1: round n+1 begins
only on a committed round n. An attempt is a ballot: its opener is the only proposer, and proposes at most one result in
it. `must_propose` is the proposer's rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atoll.v1 import dataplane_pb2 as dp

COORDINATOR = "coordinator"  # the name of the coordinator's seat; no peer id has this form
MAX_SEATS = 7  # of members
MARK_BYTES = 8
MARKS_KEPT = 4  # two are needed: the head's mark and the next round's mark


class Ballot(NamedTuple):
    """Order of an attempt in Paxos: an attempt under a newer plan is higher than any under an older plan."""

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

    Seats in `before` that are `present` stay, in their order. The first of `ranked` get the free seats. Raises
    `ValueError` if `present` is empty.
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
        """The serialised manifest that the vote is for."""
        return dp.Proposal.FromString(self.proposal).payload


def must_propose(electorate: Electorate, promised: Mapping[str, LastVote | None]) -> LastVote | None:
    """Return the earlier vote whose result a new attempt must propose, or None if it may propose a new one.

    `promised`: the seats that promised not to vote in earlier attempts, with their last votes. All votes in the highest
    ballot are for one result. If any result was committed, it is that one, and no seat that voted for it then voted for
    another result since. So the result need not be proposed if it cannot have a majority: the seats whose last vote is
    for it, in any ballot, plus the seats that did not promise.
    """
    votes = {peer: vote for peer, vote in promised.items() if vote is not None}
    if not votes:
        return None
    highest = max(votes.values(), key=lambda vote: vote.ballot)
    agreed = {peer for peer, vote in votes.items() if vote.payload == highest.payload}
    silent: Set[str] = electorate.members - promised.keys()
    return highest if electorate.decides(silent | agreed) else None


class Promised(NamedTuple):
    """The extent of a node's promises and votes. Within one epoch, a later state compares higher."""

    number: int  # of the round
    ballot: Ballot
    voted: bool = False  # in that ballot


@dataclass(frozen=True)
class VoteRecord:
    """This node's promise and vote at one round number. It is written to disk before a message is sent.

    At every head a node draws a random mark, which the next manifest contains. So a record that lacks the mark in the
    head is not the node's newest record.
    """

    number: int
    head_hash: bytes  # the manifest that the round builds on
    promised: Ballot  # this node does not vote in earlier attempts
    voted: LastVote | None = None
    marks: tuple[bytes, ...] = ()  # of the last rounds in which this node took part, the newest last
    complete: bool = True  # False: this node may have voted at this round before, so it abstains

    @property
    def newest(self) -> Promised:
        """The highest promise and vote that a node with this record has made."""
        return Promised(self.number, self.promised, self.voted is not None and self.voted.ballot == self.promised)
