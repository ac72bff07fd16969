"""What an opener has heard in one attempt: every answer is checked before it counts. Pure."""

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
    """What the opener waits for."""

    READY = auto()
    PARTS = auto()
    RESULTS = auto()
    VOTES = auto()


@dataclass
class MemberAnswers:
    """Of the members of one attempt, until it ends."""

    round_id: RoundId
    plan: Plan
    electorate: Electorate
    expected: frozenset[str]  # heard from lately: worth waiting for
    head: Head
    policy: RoundPolicy
    signer: VoteSigner
    liars: frozenset[str] = frozenset()  # take no part
    poor_reducers: frozenset[str] = frozenset()  # sum nothing
    ready: dict[str, dp.Ready] = field(default_factory=dict)
    start: dp.Start | None = None
    parts: dict[str, dp.Parts] = field(default_factory=dict)
    settled: dp.Settle | None = None
    attestations: dict[bytes, dict[str, pb.Signed]] = field(default_factory=dict)  # payload → holder → its word
    proposal: dp.Proposal | None = None
    votes: dict[str, pb.Signed] = field(default_factory=dict)  # for the proposal
    declined: dict[str, str] = field(default_factory=dict)  # peer → why
    coordinator: tuple[LastVote | None] | None = None  # it promised, with its last vote
    forgetful: set[str] = field(default_factory=set)  # seats that told another mark before
    marks: dict[str, bytes] = field(default_factory=dict)  # the first that each member told us at this head

    # --- what comes in -----------------------------------------------------------------------------

    def take_ready(self, peer: str, ready: dp.Ready) -> bool:
        """Count an answer; an earlier vote in it must be proven, because it may bind this attempt. False: declined.

        A seat that told another mark at this head has forgotten what it promised then, so it does not promise here.
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
        """What a member has at the end of its exchange."""
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
        """A holder's word; one an attempt."""
        if any(peer in said for said in self.attestations.values()):
            return
        try:
            if digest.payload not in self.attestations:  # of equal results one is checked
                self._check_result(digest.payload)
            if self.signer.attested_by(digest.payload, digest.attestation) != peer or peer not in self.holding:
                raise PeerMisbehaved("it shows the word of somebody else, or holds nothing of this")
        except AtollError as error:
            self.declined[peer] = str(error)
        else:
            self.attestations.setdefault(digest.payload, {})[peer] = digest.attestation

    def _check_result(self, payload: bytes) -> None:
        """Raise `PeerMisbehaved` unless this attempt can have come to that, but for the digests."""
        assert self.start is not None
        assert self.settled is not None
        check_payload(self.policy, self.plan, self.head, payload)
        layers = tuple(manifest_pb2.Manifest.FromString(payload).layers)
        if payload != manifest_payload(self.policy, self.plan, self.head, self.start, self.settled, layers):
            raise PeerMisbehaved("it attests to another result than this attempt can have")

    def take_vote(self, peer: str, vote: dp.Vote) -> None:
        """A seat's vote for the proposal; others have none."""
        assert self.proposal is not None
        if peer in self.votes or peer in self.forgetful or peer not in self.electorate.members:
            return
        try:
            self.signer.check_vote(self.proposal.payload, self.round_id.ballot, vote.signature, peer)
        except AtollError as error:
            self.declined[peer] = str(error)
        else:
            self.votes[peer] = vote.signature

    # --- what it comes to --------------------------------------------------------------------------

    @property
    def promised(self) -> dict[str, LastVote | None]:
        """Seats that will not vote in earlier attempts, with what they voted for last."""
        seats = self.electorate.members - self.forgetful
        promised = {peer: _voted(ready) for peer, ready in self.ready.items() if ready.voter and peer in seats}
        return promised if self.coordinator is None else promised | {COORDINATOR: self.coordinator[0]}

    @property
    def holding(self) -> frozenset[str]:
        """Who holds the layers of this round; the others are its witnesses."""
        return self.plan.holders(self.policy.fragment_of(self.round_id.number).layers)

    @property
    def members(self) -> tuple[str, ...]:
        """Who takes part in the exchange."""
        return tuple(item.peer_id for item in self.start.contributions) if self.start else tuple(self.ready)

    @property
    def standbys(self) -> frozenset[str]:
        """Those who bring nothing, or little, and hold nobody up."""
        return self.plan.on_probation.union(self.plan.standbys)

    def awaited(self, stage: Stage) -> frozenset[str]:
        """Peers whose answer in this stage may still come and is worth waiting for."""
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
        """Whether these members' votes could commit, with the coordinator's help if need be."""
        return self.electorate.decides({COORDINATOR} | (set(peers) & self.promised.keys()))

    def holds(self, payload: bytes) -> bool:
        """Whether somebody still has the state of an earlier result."""
        named = manifest_hash(payload)
        return any(named in ready.holds for ready in self.ready.values())

    def shortfall(self, stage: Stage) -> str:
        """Why the attempt fails in this stage, for people."""
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
