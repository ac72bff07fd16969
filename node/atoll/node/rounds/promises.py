"""What this node promised, voted for and holds at its head, and whether it can know: an acceptor's memory. Pure.

A node writes its first record when it enrols, and others when it holds a seat. Without any it lost its disk, and
abstains until a round was committed in which this life took part, or a recovery made all earlier votes void. A record
of a later round means that we stand at an older state than we once did.
"""

from __future__ import annotations

from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.quorum import Ballot, LastVote, VoteRecord

HELD = 2  # results of one head whose state is kept, because they may still be committed


class Promises:
    """The newest record, seen from one head under one plan's base."""

    def __init__(self, record: VoteRecord | None, head: Head, plan: Plan) -> None:
        self.votes = False  # we know all that we ever promised at this head
        self.promised: Ballot | None = None
        self.voted: LastVote | None = None
        self.held: dict[bytes, None] = {}  # payloads whose state is staged here, newest last
        self._record = record
        self._first_plan = plan.version  # of this life
        self._trusted = False  # without a record: this life took part in a committed round
        self.recall(head, plan)

    @property
    def in_doubt(self) -> bytes:
        """The payload that we voted for without knowing whether it was committed; empty for none."""
        return self.voted.payload if self.voted is not None else b""

    def took_part(self) -> None:
        """A round was committed that holds this life's snapshot: no earlier life can have voted after it."""
        self._trusted = True

    def recall(self, head: Head, plan: Plan) -> None:
        """Stand at `head`, on the history that `plan` goes on from; nothing is held."""
        self.held = {}
        self._head_hash, self._number = head.hash, head.round + 1
        self.promised = self.voted = None
        record = self._record
        if record is None:
            self.votes = self._trusted or plan.base.since_version > self._first_plan
        elif record.number < self._number or record.promised.plan_version < plan.base.since_version:
            self.votes = True
        else:
            self.votes = (record.number, record.head_hash) == (self._number, self._head_hash)
            if self.votes:
                self.promised, self.voted = record.promised, record.voted

    def next_attempt(self, plan: Plan) -> int:
        """The first attempt under `plan` that no promise forbids."""
        bound = self.promised is not None and self.promised.plan_version == plan.version
        return self.promised.attempt + 1 if self.promised is not None and bound else 0

    def forbids(self, ballot: Ballot) -> bool:
        """Whether we promised not to take part in `ballot`."""
        return self.promised is not None and ballot <= self.promised

    def pledge(self, ballot: Ballot, proposal: bytes | None = None) -> VoteRecord:
        """Promise `ballot`, and with a proposal vote for it there: what must be on disk before anyone hears of it."""
        self.promised = ballot
        if proposal is not None:
            self.voted = LastVote(ballot, proposal)
        self._record = VoteRecord(self._number, self._head_hash, ballot, self.voted)
        return self._record

    def keep(self, payload: bytes) -> None:
        """Its state is here. Of several that may be committed the newest are kept, and the one that we voted for."""
        self.held.pop(payload, None)
        self.held[payload] = None
        for other in list(self.held)[:-HELD]:
            if other != self.in_doubt:
                del self.held[other]
