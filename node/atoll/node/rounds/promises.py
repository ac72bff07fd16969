"""What this node promised, voted for and holds at its head, and whether its record is complete (Paxos acceptor). Pure.

A node writes its first record when it enrols, and another in every round in which it takes part. At each head it draws
a random mark. The mark is in the record before others receive it, and the next manifest repeats it. A seat took part in
the round that gave it the seat. So if its record lacks the mark that the head holds for it, the record was lost or
rolled back, or another process uses the same identity. Then this node abstains until it is at a head whose mark it
knows: no earlier process can have voted after that. It also votes after a recovery that happened while it runs, because
a recovery makes all earlier votes void. A record of a later round means that our state is older than the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.quorum import MARKS_KEPT, Ballot, LastVote, Promised, VoteRecord

HELD = 2  # results of one head whose state is kept, because they may still be committed


class Promises:
    """The newest record, interpreted at one head and under one plan's base."""

    def __init__(
        self,
        me: str,
        record: VoteRecord | None,
        head: Head,
        plan: Plan,
        draw_mark: Callable[[], bytes],
        told: Promised | None = None,
    ) -> None:
        """`draw_mark` returns `MARK_BYTES` random bytes.

        `told`: the promise that an earlier process told the coordinator.
        """
        self.votes = False  # whether we know all our promises at this head
        self.promised: Ballot | None = None
        self.voted: LastVote | None = None
        self.answered: Ballot | None = None  # the newest attempt at this head that an earlier process answered
        self.held: dict[bytes, None] = {}  # payloads whose state is staged here, newest last
        self._me = me
        self._mark = b""
        self._record = record
        self._draw_mark = draw_mark
        self._told = told
        self._first_plan = plan.version  # when this process started
        self.recall(head, plan)

    @property
    def in_doubt(self) -> bytes:
        """The payload that we voted for and that may or may not be committed; empty if none."""
        return self.voted.payload if self.voted is not None else b""

    @property
    def mark(self) -> bytes:
        """This node's mark at this head, drawn on first use."""
        if not self._mark:
            self._mark = self._draw_mark()
        return self._mark

    def recall(self, head: Head, plan: Plan) -> None:
        """Load the promises for `head` from the record, under the history of `plan`. No result is held."""
        self.held = {}
        self._head_hash, self._number = head.hash, head.round + 1
        self.promised = self.voted = None
        record = self._record
        here = record is not None and (record.number, record.head_hash) == (self._number, self._head_hash)
        self.answered = record.promised if record is not None and here else None
        self._mark = record.marks[-1] if record is not None and here and record.marks else b""
        if self._has_forgotten(plan):
            self.votes = False
        elif plan.base.since_version > self._first_plan and plan.base.manifest_hash == head.hash:
            self.votes = True  # the base of a recovery during this process: all earlier votes are void
        else:
            self.votes = self._may_vote(head, plan)
        if record is not None and here and self.votes and record.promised.plan_version >= plan.base.since_version:
            self.promised, self.voted = record.promised, record.voted

    def _has_forgotten(self, plan: Plan) -> bool:
        """Whether an earlier process promised more than the record contains, for this round or a later one."""
        told, record = self._told, self._record
        if told is None or told.number < self._number or told.ballot.plan_version < plan.base.since_version:
            return False
        return record is None or told > record.newest

    def _may_vote(self, head: Head, plan: Plan) -> bool:
        record, mark = self._record, _mark_of(self._me, head)
        if record is None or (mark and mark not in record.marks and record.number <= self._number):
            return False  # a record of a later round may no longer have the mark
        if not record.complete and (not mark or record.head_hash == self._head_hash):
            return False
        void = record.promised.plan_version < plan.base.since_version
        return record.number < self._number or void or record.head_hash == self._head_hash

    def next_attempt(self, plan: Plan) -> int:
        """The first attempt under `plan` that no promise forbids."""
        bound = self.promised is not None and self.promised.plan_version == plan.version
        return self.promised.attempt + 1 if self.promised is not None and bound else 0

    def forbids(self, ballot: Ballot) -> bool:
        """Whether we promised not to take part in `ballot`."""
        return self.promised is not None and ballot <= self.promised

    def pledge(self, ballot: Ballot, proposal: bytes | None = None) -> VoteRecord:
        """Promise `ballot` and, with a proposal, vote for it.

        The returned record must be on disk before any message is sent. A node that abstains promises nothing: only the
        mark is added to its record, and a record of a later round stays.
        """
        if self.votes:
            self.promised = ballot
            if proposal is not None:
                self.voted = LastVote(ballot, proposal)
        record = self._record
        marks = tuple(mark for mark in (record.marks if record else ()) if mark != self.mark)
        marks = (*marks, self.mark)[-MARKS_KEPT:]
        if record is not None and not self.votes and record.number > self._number:
            self._record = replace(record, marks=marks)
        else:
            self._record = VoteRecord(self._number, self._head_hash, ballot, self.voted, marks, complete=self.votes)
        return self._record

    def keep(self, payload: bytes) -> None:
        """Keep `payload` as held. Only the newest `HELD` results are kept, and the one that we voted for."""
        self.held.pop(payload, None)
        self.held[payload] = None
        for other in list(self.held)[:-HELD]:
            if other != self.in_doubt:
                del self.held[other]


def _mark_of(peer: str, head: Head) -> bytes:
    """The mark of a member in `head`; empty if it did not take part or could not write one."""
    return next((item.mark for item in head.manifest.contributions if item.peer_id == peer), b"")
