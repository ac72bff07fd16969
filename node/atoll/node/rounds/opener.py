"""One attempt at a round, as its opener leads it: collect answers, decide how to go on, commit or abandon. Pure.

    READY ─promises─▶ PARTS ─Settle─▶ VOTES ─▶ commit
      └───────── Adopt ───────────────▲          any stage ─▶ abandon

Members that do not hold the round's layers are asked for their votes when enough holders attest to its result.

The opener waits for everyone worth waiting for, up to deadlines learnt from earlier rounds, and then goes on with a
quorum. Whatever it wants said or done it puts into `out`; the round machine takes it from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.learned_deadline import LearnedDeadline, ResponseTimes
from atoll.core.manifest import Head, changed_layers, manifest_hash
from atoll.core.plan import Plan
from atoll.core.quorum import Ballot, Electorate, LastVote, Undecided, must_adopt
from atoll.core.round_id import RoundId
from atoll.core.verdicts import strip_unknown_verdict_fields
from atoll.node.rounds.codec_choice import CodecChoice
from atoll.node.rounds.decide import (
    build_start,
    check_partial,
    check_payload,
    check_verdicts,
    is_attested,
    is_witness,
    manifest_payload,
    parts_total,
)
from atoll.node.rounds.settlement import check_report, settle
from atoll.node.rounds.types import (
    Action,
    AskCoordinator,
    ContributorsMissing,
    Report,
    RoundPolicy,
    TieBreak,
    VoteSigner,
)
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

TIE_SECONDS = 10.0  # for the coordinator's answer
_FLOOR = 1.0  # seconds: no stage is given less, beside what it took before
_LEAST_GRACE, _GRACE = 0.5, 0.25  # for standbys when all others answered: seconds, and of what the stage took


class Stage(Enum):
    """What the opener waits for."""

    READY = auto()
    PARTS = auto()
    VOTES = auto()


@dataclass
class StageDeadlines:
    """How long each stage of one fragment's rounds took lately, and which codec that is good for."""

    ready: LearnedDeadline
    answers: ResponseTimes  # from Open to each member's Ready
    exchanges: dict[int, LearnedDeadline]  # by the number of the codec
    decision: LearnedDeadline
    decision_with_repair: LearnedDeadline  # the same where a member has to build its state again
    codec: CodecChoice
    exchange_ceiling: float

    @classmethod
    def of(cls, policy: RoundPolicy) -> tuple[StageDeadlines, ...]:
        """For each fragment, because some are larger than others; nothing seen yet."""
        timeouts = (policy.ready_timeout, policy.exchange_timeout, policy.decision_timeout)
        ready, exchange, decision = (timeout.total_seconds() for timeout in timeouts)
        all_ready, answers, turns = LearnedDeadline(_FLOOR, ready), ResponseTimes(), len(policy.fragments)
        return tuple(
            cls(
                all_ready,
                answers,
                {},
                LearnedDeadline(_FLOOR, decision),
                LearnedDeadline(_FLOOR, decision),
                CodecChoice(policy.codecs, fragment.elements, turns),
                exchange,
            )
            for fragment in policy.fragments
        )

    def exchange(self, codec: int) -> LearnedDeadline:
        """That of exchanges with codec number `codec`."""
        return self.exchanges.setdefault(codec, LearnedDeadline(_FLOOR, self.exchange_ceiling))


@dataclass
class Opener:
    """Leads one attempt. Create it, then feed `collect`, `tie_broken` and `tick`, and carry out what is in `out`."""

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
    _votes: dict[bytes, dict[str, pb.Signed]] = field(default_factory=dict)  # payload → peer → signature
    _attestations: dict[bytes, dict[str, pb.Signed]] = field(default_factory=dict)  # payload → holder → its word
    _settled: dp.Settle | None = None
    _mends: bool = False  # somebody makes its state anew, or fetches it
    _adopting: bytes = b""  # the earlier result that is to be committed
    _attested: bytes = b""  # the payload that witnesses were told to vote for
    _asked: set[bytes] = field(default_factory=set)  # of the coordinator; empty bytes: a promise
    _asking: bool = False  # its answer is awaited
    _refusal: str = ""  # why the coordinator did not
    _tie_promised: bool = False
    _tie_voted: LastVote | None = None
    _tie_breaks: dict[bytes, pb.Signed] = field(default_factory=dict)

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
            case "digest", Stage.VOTES if peer in self._members:
                self._take_vote(peer, message.digest)
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

    def tie_broken(self, answer: TieBreak, now: float) -> None:
        """The coordinator's answer."""
        self.now = now
        if answer.round_id != self.round_id or self.done:
            return
        self._asking = False
        if not answer.granted:
            self._refusal = answer.reason
            if answer.payload or self.stage is Stage.READY:
                self._push_on()  # perhaps it goes without
        elif not answer.payload:
            self._tie_promised, self._tie_voted = True, answer.voted
            if self.stage is Stage.READY:
                self._begin()
        elif answer.vote is not None:
            self._tie_breaks[answer.payload] = answer.vote
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
        if self.stage is not Stage.VOTES and self._may_commit(answered):
            grace = max(_LEAST_GRACE, _GRACE * (self.now - self._stage_began))
            self.deadline = min(self.deadline, self.now + grace)

    def _push_on(self) -> None:
        """Time is up, or everyone answered: go on with what there is."""
        match self.stage:
            case Stage.READY:
                self._begin()
            case Stage.PARTS:
                self._settle()
            case Stage.VOTES:
                self._count(final=True)

    def _begin(self) -> None:
        """Enough answered: start the exchange, or commit what may have been committed already."""
        promised = self._promised
        if not self.electorate.decides(promised.keys(), self._tie_promised):
            if self.electorate.is_half(promised.keys()) and b"" not in self._asked:
                self._ask(b"")
            elif not self._asking:
                self._abandon(self._shortfall())
            return
        try:
            adopting = must_adopt(self.electorate, promised, self._tie_promised, self._tie_voted)
        except Undecided:
            if b"" not in self._asked:
                self._ask(b"")  # it may take the coordinator's vote to commit either, and it knows
            elif not self._asking:
                self._abandon("two results may have been committed: more members must answer")
            return
        self._learn()
        holders = self._holders(adopting) if adopting is not None else ()
        if adopting is not None and holders:
            self._adopt(adopting, holders)
        elif adopting is not None and b"" not in self._asked:
            self._ask(b"")  # perhaps it takes the coordinator's vote to commit that, and it never gave one
        elif adopting is not None and self._asking:
            return
        elif adopting is not None:
            self._abandon(
                "an earlier result may have been committed, but nobody who answered still has its state; "
                "if nobody will, the operator can go on without it: atollctl run recover --force"
            )
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
        self._enter(Stage.PARTS, seconds + self.paces.decision.floor_seconds)
        self._tell(self._ready, dp.RoundMessage(start=self._start))

    def _adopt(self, payload: bytes, holders: tuple[str, ...]) -> None:
        self._adopting, self._mends = payload, True
        seconds = self.paces.exchange_ceiling  # a whole state may have to travel
        self._enter(Stage.VOTES, seconds)
        message = dp.Adopt(
            round=self.round_id.to_proto(), payload=payload, holders=holders, deadline_ms=int(seconds * 1000)
        )
        self._tell(self._ready, dp.RoundMessage(adopt=message))

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
        seconds = self._decision.timeout_seconds
        place = {peer: index for index, peer in enumerate(self._members)}
        message = dp.Settle(
            round=self.round_id.to_proto(),
            present=[peer for peer in there if not self._ready[peer].leaving] or there,
            partial=settled.partial,
            digests=digests,
            whole=[] if settled.is_complete else [place[peer] for peer in settled.whole],
            repairs=[
                dp.PartHolders(part=part, members=[place[peer] for peer in peers])
                for part, peers in sorted(settled.holders.items())
            ],
            deadline_ms=int(seconds * 1000),
            verdicts=strip_unknown_verdict_fields(verdict for peer in there for verdict in self._parts[peer].verdicts),
        )
        self._enter(Stage.VOTES, seconds)
        self._settled = message
        self._tell(self._members, dp.RoundMessage(settle=message))

    def _learn(self, *, far: bool = True, failed: bool = False) -> None:
        """How long this stage took. `far`: those who answered did not lack time themselves."""
        took = self.now - self._stage_began
        pace = self.paces.ready if self.stage is Stage.READY else self._decision
        if self.stage is Stage.PARTS and self._start is not None:
            pace = self.paces.exchange(self._start.codec)
        if self._waiting_for() - self._standbys or not far:
            pace.observe_miss(took, failed=failed)
        else:
            pace.observe(took)

    def _take_ready(self, peer: str, ready: dp.Ready) -> None:
        """Count an answer; an earlier vote in it must be proven, because it may bind this attempt."""
        if ready.HasField("accepted"):
            ballot = Ballot(ready.accepted.ballot.plan_version, ready.accepted.ballot.attempt)
            try:
                if ballot >= self.round_id.ballot:
                    raise PeerMisbehaved("a vote in an attempt that was not opened yet")
                check_payload(self.policy, self.plan, self.head, ready.accepted.payload)
                self.signer.check_vote(ready.accepted.payload, ballot, ready.accepted.signature, peer)
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

    def _take_vote(self, peer: str, digest: dp.Digest) -> None:
        said = [peers for cast in (self._votes, self._attestations) for peers in cast.values()]
        if any(peer in peers for peers in said):
            return  # one word an attempt
        payload, ballot = digest.payload, self.round_id.ballot
        try:
            if digest.HasField("attestation"):
                self._check_attested(payload)
                self.signer.check_attestation(payload, ballot, digest.attestation, peer)
                self._attestations.setdefault(payload, {})[peer] = digest.attestation
            if digest.HasField("signature"):
                self.signer.check_vote(payload, ballot, digest.signature, peer)
                self._votes.setdefault(payload, {})[peer] = digest.signature
        except AtollError as error:
            self.declined[peer] = str(error)
        self._count(final=False)

    def _check_attested(self, payload: bytes) -> None:
        """Raise `PeerMisbehaved` unless this attempt can have come to that, but for the digests."""
        check_payload(self.policy, self.plan, self.head, payload)
        due = self._adopting
        if self._start is not None and self._settled is not None:
            layers = tuple(manifest_pb2.Manifest.FromString(payload).layers)
            due = manifest_payload(self.policy, self.plan, self.head, self._start, self._settled, layers)
        if payload != due:
            raise PeerMisbehaved("it attests to another result than this attempt can have")

    def _count(self, *, final: bool) -> None:
        for payload, votes in self._votes.items():
            if self.electorate.decides(votes.keys(), payload in self._tie_breaks):
                self._decision.observe(self.now - self._stage_began)  # the quickest majority is enough
                self._commit(payload)
                return
        if self._ask_witnesses(final=final):
            self.deadline = max(self.deadline, self.now + self._decision.timeout_seconds)
            return
        if self._waiting_for() and not final:
            return
        tied = [payload for payload, votes in self._votes.items() if self.electorate.is_half(votes.keys())]
        if tied and tied[0] not in self._asked:
            self._ask(tied[0])
        elif not self._asking:
            self._abandon(self._shortfall())

    def _ask_witnesses(self, *, final: bool) -> bool:
        """Those who hold none of the layers vote once those who do attest to one result; whether they were asked now.

        Most holders must, or of those that answer more than to any other result.
        """
        if self._attested or not self._attestations:
            return False
        said_by = sorted(self._attestations.items(), key=lambda item: len(item[1]), reverse=True)
        payload, said = said_by[0]
        divided = len(said_by) > 1 and len(said_by[1][1]) == len(said)
        there = self._attesting & (self._parts.keys() if self._start else self._ready.keys())
        others = there - {peer for peers in self._attestations.values() for peer in peers} - self.declined.keys()
        enough = 2 * len(there & said.keys()) > len(there) or ((final or not others) and not divided)
        if not enough or not is_attested(self.plan, self.electorate, payload, said.keys()):
            return False
        self._attested = payload
        message = dp.Adopt(
            round=self.round_id.to_proto(),
            payload=payload,
            deadline_ms=int(self._decision.timeout_seconds * 1000),
            attestations=[dp.Attestation(peer_id=peer, signature=said[peer]) for peer in sorted(said)],
        )
        witnesses = {peer for peer in self._members if is_witness(self.plan, peer, payload)}
        self._tell(witnesses, dp.RoundMessage(adopt=message))
        return True

    @property
    def _attesting(self) -> frozenset[str]:
        """Who can attest: holders of what the attempt changes."""
        if self._start is not None or not self._adopting:
            return self._holding
        return self.plan.holders(changed_layers(manifest_pb2.Manifest.FromString(self._adopting)))

    def _commit(self, payload: bytes) -> None:
        self.done = True
        ballot = self.round_id.ballot
        committed = manifest_pb2.CommittedManifest(
            payload=payload,
            signatures=[signature for _, signature in sorted(self._votes[payload].items())],
            ballot_plan_version=ballot.plan_version,
            ballot_attempt=ballot.attempt,
            tie_break=self._tie_breaks.get(payload),
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

    def _ask(self, payload: bytes) -> None:
        self._asked.add(payload)
        self._asking = True
        self.deadline = max(self.deadline, self.now + TIE_SECONDS)
        self.out.append(AskCoordinator(self.round_id, payload))

    @property
    def _decision(self) -> LearnedDeadline:
        return self.paces.decision_with_repair if self._mends else self.paces.decision

    # --- what was collected ------------------------------------------------------------------------

    @property
    def _promised(self) -> dict[str, LastVote | None]:
        """Members of the electorate that will not vote in earlier attempts, with what they voted for last."""
        voters = self.electorate.members
        return {peer: _voted(ready) for peer, ready in self._ready.items() if ready.voter and peer in voters}

    @property
    def _holding(self) -> frozenset[str]:
        """Who holds the layers of this round; the others are its witnesses."""
        return self.plan.holders(self.policy.fragment_of(self.round_id.number).layers)

    @property
    def _members(self) -> tuple[str, ...]:
        """Who takes part in the exchange, or may adopt."""
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
            case Stage.VOTES:
                voted = {peer for votes in self._votes.values() for peer in votes}
                voters = self._promised.keys() & (self._parts.keys() if self._start else self._ready.keys())
                waiting = frozenset(voters) - voted - gone
                if self._attested or not self._start or not self.plan.cuts:
                    return waiting
                attesting = {peer for said in self._attestations.values() for peer in said}
                return (self._holding & self._parts.keys()) - attesting - gone

    def _may_commit(self, peers: Collection[str]) -> bool:
        """Whether these members' votes could commit, with the coordinator's help if need be."""
        voters = set(peers) & self._promised.keys()
        return self.electorate.decides(voters) or self.electorate.is_half(voters)

    def _holders(self, payload: bytes) -> tuple[str, ...]:
        """Who still has the state of an earlier result."""
        named = manifest_hash(payload)
        return tuple(sorted(peer for peer, ready in self._ready.items() if named in ready.holds))

    def _shortfall(self) -> str:
        """Why the attempt failed, for people."""
        if self.stage is Stage.VOTES and len(self._votes) > 1:
            odd = min((sorted(votes) for votes in self._votes.values()), key=len)
            return f"replicas differ: {', '.join(odd)} voted for another result"
        voters = self.electorate.members
        got, what = {
            Stage.READY: (len(self._promised), "answered"),
            Stage.PARTS: (len(self._promised.keys() & self._parts.keys()), "finished the exchange"),
            Stage.VOTES: (max((len(voters & votes.keys()) for votes in self._votes.values()), default=0), "voted"),
        }[self.stage]
        reason = f"no majority: {got} of {len(voters)} deciding members {what} in time"
        if self._asked and 2 * got == len(voters):
            reason += f", and the coordinator did not break the tie: {self._refusal or 'no answer'}"
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
    return LastVote(Ballot(ballot.plan_version, ballot.attempt), ready.accepted.payload)
