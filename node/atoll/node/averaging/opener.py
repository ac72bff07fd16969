"""What the opener of an attempt has collected, and what follows from it. Pure bookkeeping; round.py acts on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from atoll.core.plan import Plan
from atoll.core.quorum import Ballot, Electorate, Voted, must_adopt
from atoll.core.round_id import RoundId
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2


class Stage(Enum):
    """What the opener waits for."""

    READY = auto()
    PARTS = auto()
    VOTES = auto()


@dataclass
class Leading:
    """One attempt, as its opener sees it."""

    round_id: RoundId
    plan: Plan
    electorate: Electorate
    expected: frozenset[str]  # heard from lately: worth waiting for
    opened: float
    deadline: float
    stage: Stage = Stage.READY
    stage_began: float = 0.0
    ready: dict[str, dp.Ready] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)  # peer → why
    start: dp.Start | None = None
    parts: dict[str, dp.Parts] = field(default_factory=dict)
    settle: dp.Settle | None = None
    votes: dict[bytes, dict[str, pb.Signed]] = field(default_factory=dict)  # payload → peer → signature
    asked: set[bytes] = field(default_factory=set)  # of the coordinator; empty: a promise
    asking: bool = False  # its answer is awaited
    tie_promised: bool = False
    tie_voted: Voted | None = None
    tie_breaks: dict[bytes, pb.Signed] = field(default_factory=dict)

    @property
    def promised(self) -> dict[str, Voted | None]:
        """Members of the electorate that promised, with what they voted for last."""
        return {peer: _voted(ready) for peer, ready in self.ready.items() if ready.voter and peer in self.electorate.members}

    @property
    def members(self) -> tuple[str, ...]:
        """Who takes part in the exchange."""
        return tuple(item.peer_id for item in self.start.contributions) if self.start else tuple(self.ready)

    def has_promises(self) -> bool:
        """Whether enough members will not vote in earlier attempts any more."""
        return self.electorate.decides(self.promised.keys(), self.tie_promised)

    def to_adopt(self) -> bytes | None:
        """The earlier result that this attempt has to commit. Raises `Undecided`."""
        return must_adopt(self.electorate, self.promised, self.tie_promised, self.tie_voted)

    def holders(self, payload: bytes) -> tuple[str, ...]:
        """Who answered that it still has the state of an earlier result."""
        return tuple(
            sorted(
                peer
                for peer, ready in self.ready.items()
                if ready.HasField("accepted") and ready.accepted.held and ready.accepted.payload == payload
            )
        )

    def waiting_for(self) -> frozenset[str]:
        """Peers whose answer in this stage may still come and is worth waiting for."""
        gone = self.declined.keys()
        match self.stage:
            case Stage.READY:
                return self.expected - self.ready.keys() - gone
            case Stage.PARTS:
                return frozenset(self.members) - self.parts.keys() - gone
            case Stage.VOTES:
                voted = {peer for votes in self.votes.values() for peer in votes}
                voters = {peer for peer in self.members if peer in self.promised}
                if self.settle is not None:
                    voters &= self.parts.keys()
                return frozenset(voters) - voted - gone

    def everyone_promised(self) -> bool:
        """Whether nobody is left, in the plan or the electorate, who could know more than those who answered."""
        return self.electorate.members <= self.promised.keys() and set(self.plan.members) <= self.ready.keys()

    def may_commit(self, peers: Mapping[str, object] | set[str]) -> bool:
        """Whether these members' votes could commit, with the coordinator's help if need be."""
        voters = set(peers) & self.promised.keys()
        return self.electorate.decides(voters) or self.electorate.is_half(voters)

    def decided(self) -> bytes | None:
        """The payload with enough votes, if there is one."""
        for payload, votes in self.votes.items():
            if self.electorate.decides(votes.keys(), payload in self.tie_breaks):
                return payload
        return None

    def tied(self) -> bytes | None:
        """A payload that only lacks the coordinator's vote, and for which it was not asked yet."""
        for payload, votes in self.votes.items():
            if self.electorate.is_half(votes.keys()) and payload not in self.asked:
                return payload
        return None

    def staying(self) -> list[str]:
        """Who sent Parts and stays, in the order of the sum; all of them when everyone leaves at once."""
        there = [peer for peer in self.members if peer in self.parts]
        return [peer for peer in there if not self.ready[peer].leaving] or there

    def committed(self, payload: bytes) -> manifest_pb2.CommittedManifest:
        """The manifest with its votes."""
        ballot = self.round_id.ballot
        return manifest_pb2.CommittedManifest(
            payload=payload,
            signatures=[signature for _, signature in sorted(self.votes[payload].items())],
            ballot_plan_version=ballot.plan_version,
            ballot_attempt=ballot.attempt,
            tie_break=self.tie_breaks.get(payload),
        )

    def shortfall(self) -> str:
        """Why the attempt failed, for people."""
        voters = len(self.electorate.members)
        if self.stage is Stage.VOTES and len(self.votes) > 1:
            odd = sorted(min(self.votes.values(), key=len))
            return f"replicas differ: {', '.join(odd)} voted for another result"
        got = {
            Stage.READY: len(self.promised),
            Stage.PARTS: len(self.promised.keys() & self.parts.keys()),
            Stage.VOTES: max((len(self.electorate.members & votes.keys()) for votes in self.votes.values()), default=0),
        }[self.stage]
        what = {Stage.READY: "answered", Stage.PARTS: "finished the exchange", Stage.VOTES: "voted"}[self.stage]
        told = "; ".join(f"{peer}: {why}" for peer, why in sorted(self.declined.items()))
        reason = f"no majority: {got} of {voters} deciding members {what} in time"
        if self.asked and 2 * got == voters:
            reason += ", and the coordinator did not break the tie"
        return f"{reason} ({told})" if told else reason


def _voted(ready: dp.Ready) -> Voted | None:
    if not ready.HasField("accepted"):
        return None
    ballot = ready.accepted.ballot
    return Voted(Ballot(ballot.plan_version, ballot.attempt), ready.accepted.payload)
