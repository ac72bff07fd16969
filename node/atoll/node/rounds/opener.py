"""One attempt at a round, as its opener leads it: collect answers, propose one result, commit or abandon. Pure.

    READY ─promises─▶ PARTS ─Settle─▶ RESULTS ─Propose─▶ VOTES ─majority of seats─▶ Commit
      └──────────── an earlier result may be committed ────▲        any stage ─▶ Abandon

All members take part; only seats decide. The opener waits for everyone worth waiting for, up to deadlines learnt from
earlier rounds, and then goes on with those who answered. Whatever it wants said or done it puts into `out`; the round
machine takes it from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from atoll.core.learned_deadline import LearnedDeadline
from atoll.core.quorum import COORDINATOR, must_propose
from atoll.core.round_id import RoundId
from atoll.core.verdicts import strip_unknown_verdict_fields
from atoll.node.rounds.decide import (
    build_start,
    is_attested,
)
from atoll.node.rounds.member_answers import MemberAnswers, Stage
from atoll.node.rounds.round_trigger import STRANGERS_GRACE
from atoll.node.rounds.settlement import settle
from atoll.node.rounds.stage_deadlines import StageDeadlines
from atoll.node.rounds.types import (
    Action,
    AskCoordinator,
    ContributorsMissing,
    CoordinatorVote,
    Report,
)
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

COORDINATOR_SECONDS = 10.0  # for its answer
_NEARLY_ALL = 0.9  # of those who are asked
_LEAST_GRACE, _GRACE = 0.5, 0.25  # for standbys when all others answered: seconds, and of what the stage took


@dataclass
class Opener:
    """Leads one attempt. Feed `collect`, `coordinator_answered` and `tick`, and carry out what is in `out`.

    It has more than 20 methods: each stage of an attempt, and each word that moves it, has its own short one.
    """

    answers: MemberAnswers
    paces: StageDeadlines
    now: float
    unix_ms: int = 0  # dates a Start
    slowest_step: float = 0.0  # seconds, of those worth waiting for
    enough_since: float | None = None  # tokens sufficed for the round; None: they do not
    done: bool = False
    out: list[tuple[str, dp.RoundMessage] | Action] = field(default_factory=list)
    stage: Stage = Stage.READY
    deadline: float = 0.0
    _opened: float = 0.0
    _stage_began: float = 0.0
    _arrived: list[float] = field(default_factory=list)  # seconds of each answer since the stage began
    _mends: bool = False  # somebody makes its state anew
    _asked: set[bytes] = field(default_factory=set)  # of the coordinator; empty bytes: a promise
    _asking: bool = False  # its answer is awaited
    _refusal: str = ""  # why the coordinator did not

    @property
    def round_id(self) -> RoundId:
        """The attempt."""
        return self.answers.round_id

    def __post_init__(self) -> None:
        self._opened = self.now
        pace = self.paces.ready
        seconds = min(pace.ceiling_seconds, max(pace.timeout_seconds, pace.floor_seconds + 2 * self.slowest_step))
        self._enter(Stage.READY, seconds)
        message = dp.Open(
            round=self.round_id.to_proto(), head_hash=self.answers.head.hash, deadline_ms=int(seconds * 1000)
        )
        self._tell(self.answers.plan.members, dp.RoundMessage(open=message))

    # --- what comes in -----------------------------------------------------------------------------

    def collect(self, peer: str, kind: str, message: dp.RoundMessage, now: float) -> None:
        """An answer from a member of the plan."""
        self.now, answers = now, self.answers
        if self.done:
            return
        match kind, self.stage:
            case "ready", Stage.READY:
                self._take_ready(peer, message.ready)
            case "parts", Stage.PARTS if peer in answers.members:
                self._note_arrival(peer in answers.parts)
                answers.take_parts(peer, message.parts)
                self._answered()
            case "digest", Stage.RESULTS if peer in answers.members:
                answers.take_result(peer, message.digest)
                self._propose_result(final=False)
            case "vote", Stage.VOTES:
                answers.take_vote(peer, message.vote)
                self._count(final=False)
            case "decline", _:
                self.decline(peer, message.decline.reason[:200], now)

    def decline(self, peer: str, reason: str, now: float) -> None:
        """A member cannot go on."""
        self.now = now
        self.answers.declined[peer] = reason
        self._answered()

    def give_way(self, reason: str, now: float) -> None:
        """The others will do better in another attempt."""
        self.now = now
        self._abandon(reason)

    def may_give_way_to(self, peer: str) -> bool:
        """Whether the attempt is not under way yet, and `peer` somebody who matters to it."""
        return (
            self.stage is Stage.READY
            and not self.done
            and peer in self.answers.electorate.members | self.answers.plan.without_probation(self.answers.expected)
        )

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
            if answer.voted is not None and answer.voted.ballot >= self.round_id.ballot:
                self._abandon("the coordinator voted in a later attempt")
                return
            self.answers.coordinator = (answer.voted,)
            if self.stage is Stage.READY:
                self._begin()
        elif answer.vote is not None:
            self.answers.votes[COORDINATOR] = answer.vote
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
        if self.done or (waiting := self.answers.awaited(self.stage)) - self.answers.standbys:
            return
        if waiting:
            self._hurry()
            return
        silent = set(self.answers.plan.members) - self.answers.ready.keys() - self.answers.declined.keys()
        if self.stage is Stage.READY and silent and not self.answers.may_commit(self.answers.ready):
            return  # somebody who was silent may still answer
        self._push_on()

    def _hurry(self) -> None:
        """Only standbys are awaited: a little, as who misses the end has to fetch it; more if it takes their votes."""
        answered = self.answers.ready if self.stage is Stage.READY else self.answers.parts
        if self.stage in (Stage.READY, Stage.PARTS) and self.answers.may_commit(answered):
            grace = max(_LEAST_GRACE, _GRACE * (self.now - self._stage_began))
            if self.answers.awaited(self.stage) & self.answers.plan.on_probation:
                step = self.slowest_step if self.stage is Stage.READY else 0.0  # they answer at the end of one
                grace = max(grace, STRANGERS_GRACE, step)
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
        promised = self.answers.promised
        if not self.answers.electorate.decides(promised):
            if b"" not in self._asked and self.answers.electorate.decides([*promised, COORDINATOR]):
                self._ask(b"")
            elif not self._asking:
                self._abandon(self._shortfall())
            return
        earlier = must_propose(self.answers.electorate, promised)
        if earlier is not None and not self.answers.holds(earlier.payload):
            self._abandon(
                "an earlier result may have been committed, but nobody who answered still has its state; "
                "if nobody will, the operator can go on without it: atollctl run recover --force"
            )
            return
        self._learn()
        if earlier is not None:
            self._propose(dp.Proposal.FromString(earlier.proposal))
        elif not any(self.answers.ready[peer].tokens for peer in self._bringing):
            self._abandon("nobody who holds these layers had trained a token")
        else:
            self._start_exchange()

    @property
    def _bringing(self) -> frozenset[str]:
        """Who answered and can bring tokens that count."""
        return self.answers.plan.without_probation(self.answers.holding & self.answers.ready.keys())

    def _take_ready(self, peer: str, ready: dp.Ready) -> None:
        new = peer not in self.answers.ready
        if self.answers.take_ready(peer, ready) and new:
            self._note_arrival()
            self.paces.answers.observe(peer, self.now - self._opened)
        self._answered()

    def _note_arrival(self, known: bool = False) -> None:
        if not known:
            self._arrived.append(self.now - self._stage_began)

    def _start_exchange(self) -> None:
        began = self.enough_since if self.enough_since is not None else self.now
        codec = self.paces.codec.choose(began) if len(self.answers.ready) > 1 else self.paces.codec.finest
        seconds = self.paces.exchange(codec.number).timeout_seconds
        self.answers.start = build_start(
            self.answers.policy,
            self.answers.plan,
            self.round_id,
            self.answers.ready,
            codec=codec,
            unix_ms=self.unix_ms,
            exchange_seconds=seconds,
            poor_reducers=self.answers.poor_reducers,
        )
        self._enter(Stage.PARTS, seconds + self.paces.result.floor_seconds)
        self._tell(self.answers.ready, dp.RoundMessage(start=self.answers.start))

    def _settle(self) -> None:
        there = [peer for peer in self.answers.members if peer in self.answers.parts]
        summed = [peer for peer in there if peer in self.answers.holding]
        if not summed or not self.answers.may_commit(self.answers.parts):
            self._abandon(self._shortfall())
            return
        settled = settle(self.answers.parts, summed, self.answers.plan.on_probation)
        digests = settled.digests
        if digests and not any(digests):  # a commit would count what everybody trained and take none of it
            if not self._is_overdue:  # perhaps links grew slow, and nobody had the time for any part
                self._learn(far=False, failed=True)
            self._abandon("nobody has any part of the average")
            return
        told = [
            ContributorsMissing(
                self.round_id,
                peer,
                tuple(
                    self.answers.members[it.contributor] for it in self.answers.parts[peer].verdicts if it.parts_missing
                ),
            )
            for peer in summed
        ]
        self.out += [missed for missed in told if missed.contributors]
        self._learn(far=all(digests))
        self._mends = not settled.is_complete
        seconds = self._result.timeout_seconds
        place = {peer: index for index, peer in enumerate(self.answers.members)}
        as_reported = dp.Settle(
            round=self.round_id.to_proto(),
            present=self._staying(there),
            deadline_ms=int(seconds * 1000),
            verdicts=strip_unknown_verdict_fields(
                verdict for peer in there for verdict in self.answers.parts[peer].verdicts
            ),
            as_reported=True,
            parts_zeroed=sum(not digest for digest in digests),
            nonces=[self._nonce_of(peer) for peer in self.answers.members],
        )
        whole = dp.Settle()
        whole.CopyFrom(as_reported)
        whole.as_reported = False
        whole.digests.extend(digests)
        if not settled.is_complete:
            whole.whole.extend(place[peer] for peer in settled.sources)
            whole.repairs.extend(
                dp.PartHolders(part=part, members=[place[peer] for peer in peers])
                for part, peers in sorted(settled.holders.items())
            )
        self._enter(Stage.RESULTS, seconds)
        self.answers.settled = whole
        agreeing = set(settled.whole) | (set(self.answers.members) - self.answers.holding)
        self._tell(agreeing, dp.RoundMessage(settle=as_reported))
        self._tell(set(self.answers.members) - agreeing, dp.RoundMessage(settle=whole))

    def _staying(self, there: Sequence[str]) -> list[str]:
        """Who gets a say in the next round: not who leaves, unless only members on probation would be left."""
        staying = [peer for peer in there if not self.answers.ready[peer].leaving]
        counted = self.answers.plan.without_probation
        return staying if counted(set(staying)) or (not counted(set(there)) and staying) else list(there)

    def _nonce_of(self, peer: str) -> bytes:
        """The nonce that a member told; none of the opener, who could choose it when it knows all others."""
        parts, opener = self.answers.parts.get(peer), self.round_id.opener(self.answers.plan.openers(self.answers.head))
        return parts.nonce if parts is not None and peer != opener else b""

    def _learn(self, *, far: bool = True, failed: bool = False) -> None:
        """How long this stage took for nearly all. `far`: those who answered did not lack time themselves.

        One of ten may be late without making the next deadline longer, so a straggler costs its own part.
        """
        pace = self.paces.ready if self.stage is Stage.READY else self._result
        if self.stage is Stage.PARTS and self.answers.start is not None:
            pace = self.paces.exchange(self.answers.start.codec)
        late = self.answers.awaited(self.stage) - self.answers.standbys
        nearly_all = math.ceil(_NEARLY_ALL * (len(self._arrived) + len(late)))
        if far and not failed and 0 < nearly_all <= len(self._arrived):
            pace.observe(self._arrived[nearly_all - 1])
        else:
            pace.observe_miss(self.now - self._stage_began, failed=failed)

    def _propose_result(self, *, final: bool) -> None:
        """Propose once most holders agree, or of those that answered more than on any other result."""
        counted = self.answers.plan.without_probation
        said_by = sorted(self.answers.attestations.items(), key=lambda item: len(counted(item[1].keys())), reverse=True)
        waiting = self.answers.awaited(self.stage)
        if said_by:
            payload, said = said_by[0]
            divided = len(said_by) > 1 and len(counted(said_by[1][1].keys())) == len(counted(said.keys()))
            there = counted(self.answers.holding & self.answers.parts.keys())
            most = 2 * len(there & said.keys()) > len(there) or ((final or not waiting) and not divided)
            if most and is_attested(self.answers.plan, payload, said.keys()):
                self._result.observe(self.now - self._stage_began)  # the quickest majority is enough
                self._propose(dp.Proposal(payload=payload, attestations=[said[peer] for peer in sorted(said)]))
                return
        if final or not waiting:
            self._abandon(self._shortfall())

    def _propose(self, proposal: dp.Proposal) -> None:
        """The one result of this attempt. The coordinator is asked where the others are not enough."""
        self.answers.proposal = proposal
        seconds = self.paces.vote.timeout_seconds
        self._enter(Stage.VOTES, seconds)
        message = dp.Propose(round=self.round_id.to_proto(), proposal=proposal, deadline_ms=int(seconds * 1000))
        voters = self.answers.promised.keys() - {COORDINATOR}
        self._tell(voters, dp.RoundMessage(propose=message))
        if not self.answers.electorate.decides(voters):
            self._ask(proposal.SerializeToString(deterministic=True))

    def _count(self, *, final: bool) -> None:
        assert self.answers.proposal is not None
        if self.answers.electorate.decides(self.answers.votes):
            self.paces.vote.observe(self.now - self._stage_began)  # the quickest majority is enough
            self._commit(self.answers.proposal.payload)
            return
        if self.answers.awaited(self.stage) and not final:
            return
        proposal = self.answers.proposal.SerializeToString(deterministic=True)
        if proposal not in self._asked and self.answers.electorate.decides([*self.answers.votes, COORDINATOR]):
            self._ask(proposal)
        elif not self._asking:
            self._abandon(self._shortfall())

    def _commit(self, payload: bytes) -> None:
        self.done = True
        ballot = self.round_id.ballot
        committed = manifest_pb2.CommittedManifest(
            payload=payload,
            signatures=[signature for _, signature in sorted(self.answers.votes.items())],
            ballot_plan_version=ballot.plan_version,
            ballot_attempt=ballot.attempt,
        )
        self.out.append(Report(self.round_id, committed, "", self.now - self._opened))
        commit = dp.Commit(round=self.round_id.to_proto(), manifest=committed)
        self._tell(self.answers.plan.members, dp.RoundMessage(commit=commit))

    def _abandon(self, reason: str) -> None:
        self.done = True
        if self._is_overdue:
            self._learn(failed=True)
        self.out.append(Report(self.round_id, None, reason, self.now - self._opened))
        abandon = dp.Abandon(round=self.round_id.to_proto(), reason=reason[:500])
        self._tell(self.answers.plan.members, dp.RoundMessage(abandon=abandon))

    @property
    def _is_overdue(self) -> bool:
        """Whether somebody did not answer in time."""
        return self.now >= self.deadline and bool(self.answers.awaited(self.stage) - self.answers.standbys)

    def _ask(self, proposal: bytes) -> None:
        self._asked.add(proposal)
        self._asking = True
        self.deadline = max(self.deadline, self.now + COORDINATOR_SECONDS)
        self.out.append(AskCoordinator(self.round_id, proposal))

    @property
    def _result(self) -> LearnedDeadline:
        return self.paces.result_with_repair if self._mends else self.paces.result

    def _shortfall(self) -> str:
        """Why the attempt failed, for people."""
        reason = self.answers.shortfall(self.stage)
        if self._asked and COORDINATOR not in self.answers.votes:
            reason += f"; the coordinator did not vote: {self._refusal or 'no answer'}"
        told = "; ".join(f"{peer}: {why}" for peer, why in sorted(self.answers.declined.items()))
        return f"{reason} ({told})" if told else reason

    def _enter(self, stage: Stage, seconds: float) -> None:
        self.stage, self._stage_began, self.deadline = stage, self.now, self.now + seconds
        self._arrived = []

    def _tell(self, peers: Iterable[str], message: dp.RoundMessage) -> None:
        self.out.extend((peer, message) for peer in sorted(peers))
