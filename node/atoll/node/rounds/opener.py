"""One attempt at a round, as its opener leads it: collect answers, propose one result, commit or abandon. Pure.

    READY ─promises─▶ PARTS ─Settle─▶ RESULTS ─Propose─▶ VOTES ─majority of seats─▶ Commit
      └──────────── an earlier result may be committed ────▲        any stage ─▶ Abandon

All members take part; only seats decide. The opener waits for the members that reported lately, up to deadlines learnt
from earlier rounds. Then it continues with the members that answered. It puts messages and actions into `out`, which
the round machine carries out.
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
_NEARLY_ALL = 0.9  # share of the members that were asked
_LEAST_GRACE, _GRACE = 0.5, 0.25  # for standbys when all others answered: seconds, and share of the stage's time


@dataclass
class Opener:
    """Leads one attempt. Call `collect`, `coordinator_answered` and `tick`, and carry out what is in `out`.

    It has more than 20 methods: each stage of an attempt, and each message that ends one, has its own short one.
    """

    answers: MemberAnswers
    paces: StageDeadlines
    now: float
    unix_ms: int = 0  # dates a Start
    slowest_step: float = 0.0  # seconds, of the members that reported lately
    enough_since: float | None = None  # since when the tokens suffice for the round; None: they do not
    done: bool = False
    out: list[tuple[str, dp.RoundMessage] | Action] = field(default_factory=list)
    stage: Stage = Stage.READY
    deadline: float = 0.0
    _opened: float = 0.0
    _stage_began: float = 0.0
    _arrived: list[float] = field(default_factory=list)  # seconds of each answer since the stage began
    _mends: bool = False  # a member must build its state again
    # proposals for which the coordinator was asked; empty bytes: for a promise
    _asked: set[bytes] = field(default_factory=set)
    _asking: bool = False  # the coordinator's answer is awaited
    _refusal: str = ""  # why the coordinator refused

    @property
    def round_id(self) -> RoundId:
        """The attempt that this opener leads."""
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
        """Process an answer from a member of the plan."""
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
        """Record that a member cannot continue in this attempt."""
        self.now = now
        self.answers.declined[peer] = reason
        self._answered()

    def give_way(self, reason: str, now: float) -> None:
        """Abandon this attempt in favour of another one."""
        self.now = now
        self._abandon(reason)

    def may_give_way_to(self, peer: str) -> bool:
        """Whether the attempt has no Start yet, and `peer` is a seat or a member that reported lately."""
        return (
            self.stage is Stage.READY
            and not self.done
            and peer in self.answers.electorate.members | self.answers.plan.without_probation(self.answers.expected)
        )

    def coordinator_answered(self, answer: CoordinatorVote, now: float) -> None:
        """Process the coordinator's answer: a promise, a vote, or a refusal."""
        self.now = now
        if answer.round_id != self.round_id or self.done:
            return
        self._asking = False
        if not answer.granted:
            self._refusal = answer.reason
            if answer.proposal or self.stage is Stage.READY:
                self._push_on()  # the other votes may suffice
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
        """Continue the attempt if a deadline has passed."""
        self.now = now
        if now < self.deadline or self.done:
            return
        self._push_on()
        if not self.done and now >= self.deadline:  # the coordinator did not answer either
            self._abandon(self._shortfall())

    def supersede(self, reason: str, now: float) -> None:
        """End the attempt because the round was decided elsewhere. The attempt is still reported."""
        self.now, self.done = now, True
        self.out = [Report(self.round_id, None, reason, now - self._opened)]

    # --- progress of the attempt -----------------------------------------------------------------------

    def _answered(self) -> None:
        if self.done or (waiting := self.answers.awaited(self.stage)) - self.answers.standbys:
            return
        if waiting:
            self._hurry()
            return
        silent = set(self.answers.plan.members) - self.answers.ready.keys() - self.answers.declined.keys()
        if self.stage is Stage.READY and silent and not self.answers.may_commit(self.answers.ready):
            return  # a member that did not report lately may still answer
        self._push_on()

    def _hurry(self) -> None:
        """Only standbys are missing: wait a little, because a late member must fetch the result.

        Wait longer for needed votes.
        """
        answered = self.answers.ready if self.stage is Stage.READY else self.answers.parts
        if self.stage in (Stage.READY, Stage.PARTS) and self.answers.may_commit(answered):
            grace = max(_LEAST_GRACE, _GRACE * (self.now - self._stage_began))
            if self.answers.awaited(self.stage) & self.answers.plan.on_probation:
                # members on probation answer at the end of a step
                step = self.slowest_step if self.stage is Stage.READY else 0.0
                grace = max(grace, STRANGERS_GRACE, step)
            self.deadline = min(self.deadline, self.now + grace)

    def _push_on(self) -> None:
        """Continue with the answers so far: the deadline has passed, or everyone answered."""
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
        """If enough seats promised, start the exchange or propose an earlier result that may be committed."""
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
        """Members that answered and whose tokens count."""
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
        if digests and not any(digests):  # a commit would count everybody's tokens and average nothing
            if not self._is_overdue:  # links may have become slow, so that no part arrived in time
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
        """Members that stay for the next round: not those that leave, unless only members on probation would remain."""
        staying = [peer for peer in there if not self.answers.ready[peer].leaving]
        counted = self.answers.plan.without_probation
        return staying if counted(set(staying)) or (not counted(set(there)) and staying) else list(there)

    def _nonce_of(self, peer: str) -> bytes:
        """A member's nonce. The opener's is empty, because it could choose its own after it knows all others."""
        parts, opener = self.answers.parts.get(peer), self.round_id.opener(self.answers.plan.openers(self.answers.head))
        return parts.nonce if parts is not None and peer != opener else b""

    def _learn(self, *, far: bool = True, failed: bool = False) -> None:
        """Learn how long this stage took for 90 % of the members. `far`: those that answered had enough time.

        If one member of ten is late, the next deadline does not grow. So a straggler loses only its own part.
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
        """Propose the result that most holders attest to, or at the end the one with the most attestations."""
        counted = self.answers.plan.without_probation
        said_by = sorted(self.answers.attestations.items(), key=lambda item: len(counted(item[1].keys())), reverse=True)
        waiting = self.answers.awaited(self.stage)
        if said_by:
            payload, said = said_by[0]
            divided = len(said_by) > 1 and len(counted(said_by[1][1].keys())) == len(counted(said.keys()))
            there = counted(self.answers.holding & self.answers.parts.keys())
            most = 2 * len(there & said.keys()) > len(there) or ((final or not waiting) and not divided)
            if most and is_attested(self.answers.plan, payload, said.keys()):
                self._result.observe(self.now - self._stage_began)  # the fastest majority is sufficient
                self._propose(dp.Proposal(payload=payload, attestations=[said[peer] for peer in sorted(said)]))
                return
        if final or not waiting:
            self._abandon(self._shortfall())

    def _propose(self, proposal: dp.Proposal) -> None:
        """Propose the one result of this attempt. Ask the coordinator for its vote if the other seats are too few."""
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
            self.paces.vote.observe(self.now - self._stage_began)  # the fastest majority is sufficient
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
        """Whether a member did not answer in time."""
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
        """Why the attempt failed, as text for the log."""
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
