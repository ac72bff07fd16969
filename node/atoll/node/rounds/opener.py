"""One attempt at a round, as its opener leads it: collect answers, propose one result, commit or abandon. Pure.

    READY ─promises─▶ PARTS ─Settle─▶ RESULTS ─Propose─▶ VOTES ─majority of seats─▶ Commit
      └──────────── an earlier result may be committed ────▲        any stage ─▶ Abandon

All members take part; only seats decide. The opener waits for everyone worth waiting for, up to deadlines learnt from
earlier rounds, and then goes on with those who answered. Whatever it wants said or done it puts into `out`; the round
machine takes it from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.learned_deadline import LearnedDeadline
from atoll.core.manifest import Head, manifest_hash
from atoll.core.plan import Plan
from atoll.core.quorum import COORDINATOR, Ballot, Electorate, LastVote, must_propose
from atoll.core.round_id import RoundId
from atoll.core.verdicts import strip_unknown_verdict_fields
from atoll.node.rounds.decide import (
    build_start,
    check_attested,
    check_partial,
    check_payload,
    check_verdicts,
    is_attested,
    manifest_payload,
    parts_total,
)
from atoll.node.rounds.settlement import check_report, settle
from atoll.node.rounds.stage_deadlines import StageDeadlines
from atoll.node.rounds.types import (
    Action,
    AskCoordinator,
    ContributorsMissing,
    CoordinatorVote,
    Report,
    RoundPolicy,
    VoteSigner,
)
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

COORDINATOR_SECONDS = 10.0  # for its answer
_LEAST_GRACE, _GRACE = 0.5, 0.25  # for standbys when all others answered: seconds, and of what the stage took


class Stage(Enum):
    """What the opener waits for."""

    READY = auto()
    PARTS = auto()
    RESULTS = auto()
    VOTES = auto()


@dataclass
class Opener:
    """Leads one attempt. Feed `collect`, `coordinator_answered` and `tick`, and carry out what is in `out`."""

    round_id: RoundId
    plan: Plan
    electorate: Electorate
    expected: frozenset[str]  # heard from lately: worth waiting for
    head: Head
    policy: RoundPolicy
    paces: StageDeadlines
    signer: VoteSigner
    now: float
    unix_ms: int = 0  # dates a Start
    slowest_step: float = 0.0  # seconds, of those worth waiting for
    enough_since: float | None = None  # tokens sufficed for the round; None: they do not
    done: bool = False
    out: list[tuple[str, dp.RoundMessage] | Action] = field(default_factory=list)
    stage: Stage = Stage.READY
    deadline: float = 0.0
    declined: dict[str, str] = field(default_factory=dict)  # peer → why
    _opened: float = 0.0
    _stage_began: float = 0.0
    _ready: dict[str, dp.Ready] = field(default_factory=dict)
    _start: dp.Start | None = None
    _parts: dict[str, dp.Parts] = field(default_factory=dict)
    _settled: dp.Settle | None = None
    _mends: bool = False  # somebody makes its state anew
    _attestations: dict[bytes, dict[str, pb.Signed]] = field(default_factory=dict)  # payload → holder → its word
    _proposal: dp.Proposal | None = None
    _votes: dict[str, pb.Signed] = field(default_factory=dict)  # for the proposal
    _asked: set[bytes] = field(default_factory=set)  # of the coordinator; empty bytes: a promise
    _asking: bool = False  # its answer is awaited
    _refusal: str = ""  # why the coordinator did not
    _coordinator: tuple[LastVote | None] | None = None  # it promised, with its last vote

    def __post_init__(self) -> None:
        self._opened = self.now
        pace = self.paces.ready
        seconds = min(pace.ceiling_seconds, max(pace.timeout_seconds, pace.floor_seconds + 2 * self.slowest_step))
        self._enter(Stage.READY, seconds)
        message = dp.Open(round=self.round_id.to_proto(), head_hash=self.head.hash, deadline_ms=int(seconds * 1000))
        self._tell(self.plan.members, dp.RoundMessage(open=message))

    # --- what comes in -----------------------------------------------------------------------------

    def collect(self, peer: str, kind: str, message: dp.RoundMessage, now: float) -> None:
        """An answer from a member of the plan."""
        self.now = now
        if self.done:
            return
        match kind, self.stage:
            case "ready", Stage.READY:
                self._take_ready(peer, message.ready)
            case "parts", Stage.PARTS if peer in self._members:
                self._take_parts(peer, message.parts)
            case "digest", Stage.RESULTS if peer in self._members:
                self._take_result(peer, message.digest)
            case "vote", Stage.VOTES:
                self._take_vote(peer, message.vote)
            case "decline", _:
                self.decline(peer, message.decline.reason[:200], now)

    def decline(self, peer: str, reason: str, now: float) -> None:
        """A member cannot go on."""
        self.now = now
        self.declined[peer] = reason
        self._answered()

    def give_way(self, reason: str, now: float) -> None:
        """The others will do better in another attempt."""
        self.now = now
        self._abandon(reason)

    def may_give_way_to(self, peer: str) -> bool:
        """Whether the attempt is not under way yet, and `peer` somebody who matters to it."""
        return self.stage is Stage.READY and not self.done and peer in self.electorate.members | self.expected

    def coordinator_answered(self, answer: CoordinatorVote, now: float) -> None:
        """A promise, a vote, or neither."""
        self.now = now
        if answer.round_id != self.round_id or self.done:
            return
        self._asking = False
        if not answer.granted:
            self._refusal = answer.reason
            if answer.proposal or self.stage is Stage.READY:
                self._push_on()  # perhaps it goes without
        elif not answer.proposal:
            self._coordinator = (answer.voted,)
            if self.stage is Stage.READY:
                self._begin()
        elif answer.vote is not None:
            self._votes[COORDINATOR] = answer.vote
            self._count(final=False)

    def tick(self, now: float) -> None:
        """Time passed."""
        self.now = now
        if now < self.deadline or self.done:
            return
        self._push_on()
        if not self.done and now >= self.deadline:  # the coordinator does not answer either
            self._abandon(self._shortfall())

    def supersede(self, reason: str, now: float) -> None:
        """The round is over otherwise: nobody follows this attempt any more, but it is accounted for."""
        self.now, self.done = now, True
        self.out = [Report(self.round_id, None, reason, now - self._opened)]

    # --- how it goes on ----------------------------------------------------------------------------

    def _answered(self) -> None:
        if self.done or (waiting := self._waiting_for()) - self._standbys:
            return
        if waiting:
            self._hurry()
            return
        silent = set(self.plan.members) - self._ready.keys() - self.declined.keys()
        if self.stage is Stage.READY and silent and not self._may_commit(self._ready):
            return  # somebody who was silent may still answer
        self._push_on()

    def _hurry(self) -> None:
        """Only standbys are awaited: a little, as who misses the end has to fetch it; more if it takes their votes."""
        answered = self._ready if self.stage is Stage.READY else self._parts
        if self.stage in (Stage.READY, Stage.PARTS) and self._may_commit(answered):
            grace = max(_LEAST_GRACE, _GRACE * (self.now - self._stage_began))
            self.deadline = min(self.deadline, self.now + grace)

    def _push_on(self) -> None:
        """Time is up, or everyone answered: go on with what there is."""
        match self.stage:
            case Stage.READY:
                self._begin()
            case Stage.PARTS:
                self._settle()
            case Stage.RESULTS:
                self._propose_result(final=True)
            case Stage.VOTES:
                self._count(final=True)

    def _begin(self) -> None:
        """Enough promised: start the exchange, or propose what may be committed already."""
        promised = self._promised
        if not self.electorate.decides(promised):
            if b"" not in self._asked and self.electorate.decides([*promised, COORDINATOR]):
                self._ask(b"")
            elif not self._asking:
                self._abandon(self._shortfall())
            return
        earlier = must_propose(self.electorate, promised)
        if earlier is not None and not self._holders(earlier.payload):
            self._abandon(
                "an earlier result may have been committed, but nobody who answered still has its state; "
                "if nobody will, the operator can go on without it: atollctl run recover --force"
            )
            return
        self._learn()
        if earlier is not None:
            self._propose(dp.Proposal.FromString(earlier.proposal))
        elif not any(self._ready[peer].tokens for peer in self._holding & self._ready.keys()):
            self._abandon("nobody who holds these layers had trained a token")
        else:
            self._start_exchange()

    def _start_exchange(self) -> None:
        began = self.enough_since if self.enough_since is not None else self.now
        codec = self.paces.codec.choose(began) if len(self._ready) > 1 else self.paces.codec.finest
        seconds = self.paces.exchange(codec.number).timeout_seconds
        self._start = build_start(
            self.policy,
            self.plan,
            self.round_id,
            self._ready,
            codec=codec,
            unix_ms=self.unix_ms,
            exchange_seconds=seconds,
        )
        self._enter(Stage.PARTS, seconds + self.paces.result.floor_seconds)
        self._tell(self._ready, dp.RoundMessage(start=self._start))

    def _settle(self) -> None:
        there = [peer for peer in self._members if peer in self._parts]
        summed = [peer for peer in there if peer in self._holding]
        if not summed or not self._may_commit(self._parts):
            self._abandon(self._shortfall())
            return
        settled = settle(self._parts, summed)
        digests = settled.digests
        if digests and not any(digests):  # a commit would count what everybody trained and take none of it
            if not self._is_overdue:  # perhaps links grew slow, and nobody had the time for any part
                self._learn(far=False, failed=True)
            self._abandon("nobody has any part of the average")
            return
        told = [
            ContributorsMissing(self.round_id, peer, tuple(sorted(set(self._parts[peer].partial)))) for peer in summed
        ]
        self.out += [missed for missed in told if missed.contributors]
        self._learn(far=all(digests))
        self._mends = not settled.is_complete
        seconds = self._result.timeout_seconds
        place = {peer: index for index, peer in enumerate(self._members)}
        as_reported = dp.Settle(
            round=self.round_id.to_proto(),
            present=[peer for peer in there if not self._ready[peer].leaving] or there,
            partial=settled.partial,
            deadline_ms=int(seconds * 1000),
            verdicts=strip_unknown_verdict_fields(verdict for peer in there for verdict in self._parts[peer].verdicts),
            as_reported=True,
            parts_zeroed=sum(not digest for digest in digests),
        )
        whole = dp.Settle()
        whole.CopyFrom(as_reported)
        whole.as_reported = False
        whole.digests.extend(digests)
        if not settled.is_complete:
            whole.whole.extend(place[peer] for peer in settled.whole)
            whole.repairs.extend(
                dp.PartHolders(part=part, members=[place[peer] for peer in peers])
                for part, peers in sorted(settled.holders.items())
            )
        self._enter(Stage.RESULTS, seconds)
        self._settled = whole
        agreeing = set(settled.whole) | (set(self._members) - self._holding)
        self._tell(agreeing, dp.RoundMessage(settle=as_reported))
        self._tell(set(self._members) - agreeing, dp.RoundMessage(settle=whole))

    def _learn(self, *, far: bool = True, failed: bool = False) -> None:
        """How long this stage took. `far`: those who answered did not lack time themselves."""
        took = self.now - self._stage_began
        pace = {Stage.READY: self.paces.ready, Stage.VOTES: self.paces.vote}.get(self.stage, self._result)
        if self.stage is Stage.PARTS and self._start is not None:
            pace = self.paces.exchange(self._start.codec)
        if self._waiting_for() - self._standbys or not far:
            pace.observe_miss(took, failed=failed)
        else:
            pace.observe(took)

    def _take_ready(self, peer: str, ready: dp.Ready) -> None:
        """Count an answer; an earlier vote in it must be proven, because it may bind this attempt."""
        if ready.HasField("accepted"):
            accepted = ready.accepted
            ballot = Ballot(accepted.ballot.plan_version, accepted.ballot.attempt)
            try:
                if ballot >= self.round_id.ballot:
                    raise PeerMisbehaved("a vote in an attempt that was not opened yet")
                check_payload(self.policy, self.plan, self.head, accepted.proposal.payload)
                check_attested(self.plan, self.signer, accepted.proposal)
                self.signer.check_vote(accepted.proposal.payload, ballot, accepted.signature, peer)
            except AtollError as error:
                self.decline(peer, f"its earlier vote does not count: {error}", self.now)
                return
        if peer not in self._ready:
            self.paces.answers.observe(peer, self.now - self._opened)
        self._ready[peer] = ready
        self._answered()

    def _take_parts(self, peer: str, report: dp.Parts) -> None:
        assert self._start is not None
        try:
            check_report(peer, report, parts_total(self._start) if peer in self._holding else 0)
            check_verdicts(self._start, report.verdicts, said_by=peer)
            check_partial(self._start, report.partial, said_by=peer)
        except PeerMisbehaved as error:
            self.declined[peer] = str(error)
        else:
            self._parts[peer] = report
        self._answered()

    def _take_result(self, peer: str, digest: dp.Digest) -> None:
        """A holder's word; one an attempt."""
        if any(peer in said for said in self._attestations.values()):
            return
        try:
            if digest.payload not in self._attestations:  # of equal results one is checked
                self._check_result(digest.payload)
            if self.signer.attested_by(digest.payload, digest.attestation) != peer or peer not in self._holding:
                raise PeerMisbehaved("it shows the word of somebody else, or holds nothing of this")
        except AtollError as error:
            self.declined[peer] = str(error)
        else:
            self._attestations.setdefault(digest.payload, {})[peer] = digest.attestation
        self._propose_result(final=False)

    def _check_result(self, payload: bytes) -> None:
        """Raise `PeerMisbehaved` unless this attempt can have come to that, but for the digests."""
        assert self._start is not None
        assert self._settled is not None
        check_payload(self.policy, self.plan, self.head, payload)
        layers = tuple(manifest_pb2.Manifest.FromString(payload).layers)
        if payload != manifest_payload(self.policy, self.plan, self.head, self._start, self._settled, layers):
            raise PeerMisbehaved("it attests to another result than this attempt can have")

    def _propose_result(self, *, final: bool) -> None:
        """Propose once most holders agree, or of those that answered more than on any other result."""
        said_by = sorted(self._attestations.items(), key=lambda item: len(item[1]), reverse=True)
        waiting = self._waiting_for()
        if said_by:
            payload, said = said_by[0]
            divided = len(said_by) > 1 and len(said_by[1][1]) == len(said)
            there = self._holding & self._parts.keys()
            most = 2 * len(there & said.keys()) > len(there) or ((final or not waiting) and not divided)
            if most and is_attested(self.plan, payload, said.keys()):
                self._learn()
                self._propose(dp.Proposal(payload=payload, attestations=[said[peer] for peer in sorted(said)]))
                return
        if final or not waiting:
            self._abandon(self._shortfall())

    def _propose(self, proposal: dp.Proposal) -> None:
        """The one result of this attempt. The coordinator is asked where the others are not enough."""
        self._proposal = proposal
        seconds = self.paces.vote.timeout_seconds
        self._enter(Stage.VOTES, seconds)
        message = dp.Propose(round=self.round_id.to_proto(), proposal=proposal, deadline_ms=int(seconds * 1000))
        voters = self._promised.keys() - {COORDINATOR}
        self._tell(voters, dp.RoundMessage(propose=message))
        if not self.electorate.decides(voters):
            self._ask(proposal.SerializeToString(deterministic=True))

    def _take_vote(self, peer: str, vote: dp.Vote) -> None:
        assert self._proposal is not None
        if peer in self._votes or peer not in self.electorate.members:
            return
        try:
            self.signer.check_vote(self._proposal.payload, self.round_id.ballot, vote.signature, peer)
        except AtollError as error:
            self.declined[peer] = str(error)
        else:
            self._votes[peer] = vote.signature
        self._count(final=False)

    def _count(self, *, final: bool) -> None:
        assert self._proposal is not None
        if self.electorate.decides(self._votes):
            self.paces.vote.observe(self.now - self._stage_began)  # the quickest majority is enough
            self._commit(self._proposal.payload)
            return
        if self._waiting_for() and not final:
            return
        proposal = self._proposal.SerializeToString(deterministic=True)
        if proposal not in self._asked and self.electorate.decides([*self._votes, COORDINATOR]):
            self._ask(proposal)
        elif not self._asking:
            self._abandon(self._shortfall())

    def _commit(self, payload: bytes) -> None:
        self.done = True
        ballot = self.round_id.ballot
        committed = manifest_pb2.CommittedManifest(
            payload=payload,
            signatures=[signature for _, signature in sorted(self._votes.items())],
            ballot_plan_version=ballot.plan_version,
            ballot_attempt=ballot.attempt,
        )
        self.out.append(Report(self.round_id, committed, "", self.now - self._opened))
        commit = dp.Commit(round=self.round_id.to_proto(), manifest=committed)
        self._tell(self.plan.members, dp.RoundMessage(commit=commit))

    def _abandon(self, reason: str) -> None:
        self.done = True
        if self._is_overdue:
            self._learn(failed=True)
        self.out.append(Report(self.round_id, None, reason, self.now - self._opened))
        abandon = dp.Abandon(round=self.round_id.to_proto(), reason=reason[:500])
        self._tell(self.plan.members, dp.RoundMessage(abandon=abandon))

    @property
    def _is_overdue(self) -> bool:
        """Whether somebody did not answer in time."""
        return self.now >= self.deadline and bool(self._waiting_for() - self._standbys)

    def _ask(self, proposal: bytes) -> None:
        self._asked.add(proposal)
        self._asking = True
        self.deadline = max(self.deadline, self.now + COORDINATOR_SECONDS)
        self.out.append(AskCoordinator(self.round_id, proposal))

    @property
    def _result(self) -> LearnedDeadline:
        return self.paces.result_with_repair if self._mends else self.paces.result

    # --- what was collected ------------------------------------------------------------------------

    @property
    def _promised(self) -> dict[str, LastVote | None]:
        """Seats that will not vote in earlier attempts, with what they voted for last."""
        seats = self.electorate.members
        promised = {peer: _voted(ready) for peer, ready in self._ready.items() if ready.voter and peer in seats}
        return promised if self._coordinator is None else promised | {COORDINATOR: self._coordinator[0]}

    @property
    def _holding(self) -> frozenset[str]:
        """Who holds the layers of this round; the others are its witnesses."""
        return self.plan.holders(self.policy.fragment_of(self.round_id.number).layers)

    @property
    def _members(self) -> tuple[str, ...]:
        """Who takes part in the exchange."""
        return tuple(item.peer_id for item in self._start.contributions) if self._start else tuple(self._ready)

    @property
    def _standbys(self) -> frozenset[str]:
        """Those who bring nothing and hold nobody up."""
        return frozenset(self.plan.standbys)

    def _waiting_for(self) -> frozenset[str]:
        """Peers whose answer in this stage may still come and is worth waiting for."""
        gone = self.declined.keys()
        match self.stage:
            case Stage.READY:
                return self.expected - self._ready.keys() - gone
            case Stage.PARTS:
                return frozenset(self._members) - self._parts.keys() - gone
            case Stage.RESULTS:
                said = {peer for words in self._attestations.values() for peer in words}
                return (self._holding & self._parts.keys()) - said - gone
            case Stage.VOTES:
                return frozenset(self._promised.keys() - {COORDINATOR} - self._votes.keys() - gone)

    def _may_commit(self, peers: Iterable[str]) -> bool:
        """Whether these members' votes could commit, with the coordinator's help if need be."""
        return self.electorate.decides({COORDINATOR} | (set(peers) & self._promised.keys()))

    def _holders(self, payload: bytes) -> tuple[str, ...]:
        """Who still has the state of an earlier result."""
        named = manifest_hash(payload)
        return tuple(sorted(peer for peer, ready in self._ready.items() if named in ready.holds))

    def _shortfall(self) -> str:
        """Why the attempt failed, for people."""
        seats = self.electorate.members
        if self.stage is Stage.RESULTS:
            if len(self._attestations) > 1:
                odd = min((sorted(said) for said in self._attestations.values()), key=len)
                return f"replicas differ: {', '.join(odd)} computed another result"
            got = max((len(said) for said in self._attestations.values()), default=0)
            reason = f"{got} of {len(self._holding & self._parts.keys())} members that finished hold the result"
        else:
            who, what = {
                Stage.READY: (self._promised.keys() & seats, "answered"),
                Stage.PARTS: (self._promised.keys() & self._parts.keys() & seats, "finished the exchange"),
                Stage.VOTES: (self._votes.keys() & seats, "voted"),
            }[self.stage]
            reason = f"no majority: {len(who)} of {len(seats)} seats {what} in time"
            if self._asked and COORDINATOR not in who:
                reason += f", and the coordinator did not: {self._refusal or 'no answer'}"
        told = "; ".join(f"{peer}: {why}" for peer, why in sorted(self.declined.items()))
        return f"{reason} ({told})" if told else reason

    def _enter(self, stage: Stage, seconds: float) -> None:
        self.stage, self._stage_began, self.deadline = stage, self.now, self.now + seconds

    def _tell(self, peers: Iterable[str], message: dp.RoundMessage) -> None:
        self.out.extend((peer, message) for peer in sorted(peers))


def _voted(ready: dp.Ready) -> LastVote | None:
    if not ready.HasField("accepted"):
        return None
    ballot = ready.accepted.ballot
    return LastVote(
        Ballot(ballot.plan_version, ballot.attempt), ready.accepted.proposal.SerializeToString(deterministic=True)
    )
