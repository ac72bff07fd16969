"""The answers that an opener received in one attempt. Each is checked before it counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.manifest import Head, manifest_hash
from atoll.core.plan import Plan
from atoll.core.quorum import COORDINATOR, Ballot, Electorate, LastVote
from atoll.core.round_id import RoundId
from atoll.node.rounds.decide import (
    check_attested,
    check_payload,
    check_verdicts,
    is_mark,
    manifest_payload,
    parts_total,
)
from atoll.node.rounds.settlement import NONCE_BYTES, check_report
from atoll.node.rounds.types import RoundPolicy, VoteSigner
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2


class Stage(Enum):
    """The answers that the opener waits for."""

    READY = auto()
    PARTS = auto()
    RESULTS = auto()
    VOTES = auto()


@dataclass
class MemberAnswers:
    """The answers of the members in one attempt."""

    round_id: RoundId
    plan: Plan
    electorate: Electorate
    expected: frozenset[str]  # members that reported lately; the opener waits for them
    head: Head
    policy: RoundPolicy
    signer: VoteSigner
    liars: frozenset[str] = frozenset()  # take no part
    poor_reducers: frozenset[str] = frozenset()  # sum nothing
    ready: dict[str, dp.Ready] = field(default_factory=dict)
    start: dp.Start | None = None
    parts: dict[str, dp.Parts] = field(default_factory=dict)
    settled: dp.Settle | None = None
    attestations: dict[bytes, dict[str, pb.Signed]] = field(default_factory=dict)  # payload → holder → its attestation
    proposal: dp.Proposal | None = None
    votes: dict[str, pb.Signed] = field(default_factory=dict)  # for the proposal
    declined: dict[str, str] = field(default_factory=dict)  # peer → why
    coordinator: tuple[LastVote | None] | None = None  # set once the coordinator has promised: its last vote, if any
    forgetful: set[str] = field(default_factory=set)  # seats that sent another mark before
    marks: dict[str, bytes] = field(default_factory=dict)  # the first mark that each member sent at this head

    # --- what comes in -----------------------------------------------------------------------------

    def take_ready(self, peer: str, ready: dp.Ready) -> bool:
        """Count a Ready. An earlier vote in it must be proven, because it may bind this attempt.

        Returns False if declined. A seat that sent another mark at this head before has lost its record of promises, so
        its Ready is no promise.
        """
        if peer in self.ready:
            return True  # the first answer counts
        if peer in self.liars:
            self.declined[peer] = "its word contradicted several reducers"
            return False
        if not is_mark(ready.mark):
            self.declined[peer] = f"its mark has {len(ready.mark)} bytes"
            return False
        if ready.HasField("accepted") and peer in self.electorate.members:
            accepted = ready.accepted
            ballot = Ballot(accepted.ballot.plan_version, accepted.ballot.attempt)
            try:
                if ballot >= self.round_id.ballot:
                    raise PeerMisbehaved("a vote in an attempt that was not opened yet")
                check_payload(self.policy, self.plan, self.head, accepted.proposal.payload)
                made = RoundId.from_proto(manifest_pb2.Manifest.FromString(accepted.proposal.payload).round)
                if ballot < made.ballot:
                    raise PeerMisbehaved("a vote in an attempt before the result was made")
                check_attested(self.plan, self.signer, accepted.proposal)
                self.signer.check_vote(accepted.proposal.payload, ballot, accepted.signature, peer)
            except AtollError as error:
                self.declined[peer] = f"its earlier vote does not count: {error}"
                return False
        self.ready[peer] = ready
        if ready.mark and ready.mark != self.marks.setdefault(peer, ready.mark):
            self.forgetful.add(peer)
        return True

    def take_parts(self, peer: str, report: dp.Parts) -> None:
        """Count a member's report of its parts at the end of the exchange."""
        assert self.start is not None
        try:
            check_report(peer, report, parts_total(self.start) if peer in self.holding else 0)
            if len(report.nonce) != (NONCE_BYTES if peer in self.holding else 0):
                raise PeerMisbehaved(f"{peer} reports a nonce of {len(report.nonce)} bytes")
            check_verdicts(self.start, report.verdicts, said_by=peer)
        except PeerMisbehaved as error:
            self.declined[peer] = str(error)
        else:
            self.parts[peer] = report

    def take_result(self, peer: str, digest: dp.Digest) -> None:
        """Count a holder's attestation, one per attempt."""
        if any(peer in said for said in self.attestations.values()):
            return
        try:
            if digest.payload not in self.attestations:  # equal results are checked once
                self._check_result(digest.payload)
            if self.signer.attested_by(digest.payload, digest.attestation) != peer or peer not in self.holding:
                raise PeerMisbehaved("it shows the word of somebody else, or holds nothing of this")
        except AtollError as error:
            self.declined[peer] = str(error)
        else:
            self.attestations.setdefault(digest.payload, {})[peer] = digest.attestation

    def _check_result(self, payload: bytes) -> None:
        """Raise `PeerMisbehaved` unless this attempt can have this result. Digests are not checked."""
        assert self.start is not None
        assert self.settled is not None
        check_payload(self.policy, self.plan, self.head, payload)
        layers = tuple(manifest_pb2.Manifest.FromString(payload).layers)
        if payload != manifest_payload(self.policy, self.plan, self.head, self.start, self.settled, layers):
            raise PeerMisbehaved("it attests to another result than this attempt can have")

    def take_vote(self, peer: str, vote: dp.Vote) -> None:
        """Count a seat's vote for the proposal. Other members have no vote."""
        assert self.proposal is not None
        if peer in self.votes or peer in self.forgetful or peer not in self.electorate.members:
            return
        try:
            self.signer.check_vote(self.proposal.payload, self.round_id.ballot, vote.signature, peer)
        except AtollError as error:
            self.declined[peer] = str(error)
        else:
            self.votes[peer] = vote.signature

    # --- results ----------------------------------------------------------------------------------

    @property
    def promised(self) -> dict[str, LastVote | None]:
        """Seats that promised not to vote in earlier attempts, with their last vote."""
        seats = self.electorate.members - self.forgetful
        promised = {peer: _voted(ready) for peer, ready in self.ready.items() if ready.voter and peer in seats}
        return promised if self.coordinator is None else promised | {COORDINATOR: self.coordinator[0]}

    @property
    def holding(self) -> frozenset[str]:
        """The members that hold the layers of this round. The others are witnesses."""
        return self.plan.holders(self.policy.fragment_of(self.round_id.number).layers)

    @property
    def members(self) -> tuple[str, ...]:
        """The members that take part in the exchange."""
        return tuple(item.peer_id for item in self.start.contributions) if self.start else tuple(self.ready)

    @property
    def standbys(self) -> frozenset[str]:
        """Members that contribute little or nothing. The attempt does not wait long for them."""
        return self.plan.on_probation.union(self.plan.standbys)

    def awaited(self, stage: Stage) -> frozenset[str]:
        """Members whose answer in this stage is still expected."""
        gone = self.declined.keys()
        match stage:
            case Stage.READY:
                return self.expected - self.ready.keys() - gone
            case Stage.PARTS:
                return frozenset(self.members) - self.parts.keys() - gone
            case Stage.RESULTS:
                said = {peer for words in self.attestations.values() for peer in words}
                return (self.holding & self.parts.keys()) - said - gone
            case Stage.VOTES:
                return frozenset(self.promised.keys() - {COORDINATOR} - self.votes.keys() - gone)

    def may_commit(self, peers: Iterable[str]) -> bool:
        """Whether the votes of these members could commit, with the coordinator's vote if necessary."""
        return self.electorate.decides({COORDINATOR} | (set(peers) & self.promised.keys()))

    def holds(self, payload: bytes) -> bool:
        """Whether any member that answered still has the state of an earlier result."""
        named = manifest_hash(payload)
        return any(named in ready.holds for ready in self.ready.values())

    def shortfall(self, stage: Stage) -> str:
        """Why the attempt fails in this stage, as text for the log."""
        seats = self.electorate.members
        if stage is Stage.RESULTS:
            if len(self.attestations) > 1:
                odd = min((sorted(said) for said in self.attestations.values()), key=len)
                return f"replicas differ: {', '.join(odd)} computed another result"
            got = max((len(said) for said in self.attestations.values()), default=0)
            return f"{got} of {len(self.holding & self.parts.keys())} members that finished hold the result"
        who, what = {
            Stage.READY: (self.promised.keys() & seats, "answered"),
            Stage.PARTS: (self.promised.keys() & self.parts.keys() & seats, "finished the exchange"),
            Stage.VOTES: (self.votes.keys() & seats, "voted"),
        }[stage]
        return f"no majority: {len(who)} of {len(seats)} seats {what} in time"


def _voted(ready: dp.Ready) -> LastVote | None:
    if not ready.HasField("accepted"):
        return None
    ballot = ready.accepted.ballot
    return LastVote(
        Ballot(ballot.plan_version, ballot.attempt), ready.accepted.proposal.SerializeToString(deterministic=True)
    )
