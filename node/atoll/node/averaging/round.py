"""The outer round as a pure state machine: events in, actions out, no I/O, no clock of its own.

    IDLE ─Open─▶ FREEZING ─▶ READY ─Start─▶ EXCHANGING ─▶ PARTED ─Settle─▶ STAGING ─▶ VOTED ─Commit─▶ IDLE
                               └────────────────── Adopt ──────────────────▲

Everyone is a follower; the attempt's number names the one that is also its opener (opener.py leads, here is followed).
A round commits with the votes of a strict majority of the members that were present in the round before, or of half
of them and the coordinator (core/quorum.py). Attempts are ballots of Paxos: Ready is the promise, Digest the vote, and
an attempt that learns of an earlier result which may have been committed commits that one. docs/explain/rounds.md
draws it, with the failures.

Training goes on in every phase. At one head at most one snapshot of this node's progress ever leaves it, so no
contribution can be counted twice whatever becomes of the attempts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto

from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.manifest import Head, manifest_hash
from atoll.core.plan import Plan
from atoll.core.quorum import Ballot, Electorate, Voted
from atoll.core.round_id import RoundId
from atoll.node.averaging.decide import check_payload, check_settle, check_start, manifest_payload
from atoll.node.averaging.opener import TIE_SECONDS, Opener, Paces
from atoll.node.averaging.round_types import (
    Action,
    CatchUp,
    Complete,
    Event,
    Failed,
    Freeze,
    Frozen,
    HeadMoved,
    Install,
    Leave,
    Lost,
    Obtain,
    Obtained,
    Parted,
    PlanReceived,
    Pledge,
    Progress,
    Received,
    Release,
    RoundPolicy,
    RunExchange,
    Seals,
    Send,
    SharePlan,
    Staged,
    Tick,
    TieBreak,
    VoteRecord,
)
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

NEXT_OPENERS = 3  # the following attempts' openers are told how many tokens there are
MAX_ATTEMPT_JUMP = 1000  # an opener cannot push the attempt counter further than this at once
MAX_ATTEMPT = 1_000_000
HELD = 2  # results of one head whose state is kept, because they may still be committed
_LATELY = 3.0  # report intervals after which a silent member is not waited for
_SETTLE_FLOORS = 4  # of the opener's slack, after the exchange's time, until Settle is overdue
_LOST_SECONDS = 1.0  # an opener whose connection broke has that long to say something
_BACKOFF = (0.25, 5.0)  # seconds before the next attempt: after one failure, at most
_TURNS = (0.5, 2.0, 8.0)  # seconds until a failed opener is followed again: after one, at most, at most when silent


class Phase(Enum):
    """Where this node stands in a round."""

    IDLE = auto()
    FREEZING = auto()
    READY = auto()
    EXCHANGING = auto()
    PARTED = auto()
    STAGING = auto()
    VOTED = auto()


@dataclass(frozen=True)
class _Heard:
    """A member's last token report."""

    tokens: int
    when: float
    leaving: bool
    step_seconds: float


@dataclass
class _Following:
    """The attempt that this node takes part in."""

    round_id: RoundId
    opener: str
    plan: Plan  # the attempt ends under the plan it began with
    deadline: float
    ready: dp.Ready | None = None
    parts: tuple[bytes, ...] = ()  # what we reported to hold
    start: dp.Start | None = None
    parted: bool = False
    settle: dp.Settle | None = None
    commit: manifest_pb2.CommittedManifest | None = None  # it came before our own result was staged


class RoundMachine:
    """One fragment's rounds on one node. Feed `step`; carry out what it returns, in order."""

    # what belongs to the head; `_reset` begins it anew
    _following: _Following | None
    _opener: Opener | None
    _frozen: Frozen | None  # the snapshot
    _exposed_in: set[RoundId]  # attempts in which the snapshot left this node
    _held: dict[bytes, None]  # payloads whose state is staged here, newest last
    _voted: Voted | None  # what we voted for last
    _promised: Ballot | None
    _voter: bool  # we know all that we ever promised
    _told: dict[str, float]  # peers that heard our head from us, and when
    _failures: int
    _declined_to: int  # the attempt that others could still follow
    _strikes: dict[str, int]  # openers of failed attempts
    _refused_until: dict[str, float]  # openers that must let others have their turn
    _not_before: float  # back off until then
    _last_commit: float
    # what belongs to head and plan; `_fresh_count` begins it anew
    _heard: dict[str, _Heard]  # what members reported
    _reported: float
    _due_since: float | None
    _settled_in: float

    def __init__(
        self,
        me: str,
        policy: RoundPolicy,
        seals: Seals,
        head: Head,
        plan: Plan,
        now: float,
        record: VoteRecord | None = None,
        known: Head | None = None,
    ) -> None:
        self.me = me
        self.policy = policy
        self.head = head
        self.plan = plan
        self.phase = Phase.IDLE
        self.attempt = 0  # the next one
        self._seals = seals
        self._record = record  # the newest that is on disk
        self._trusted = False  # without a record: whether this life took part in a committed round
        self._reached = float("-inf")
        self._left: set[str] = set()  # members for whose leaving a round was opened before
        self._known = known or head  # the newest that this node ever saw committed
        self._tokens = 0
        self._step_seconds = 0.0
        self._first_plan = plan.version
        self._next_plan: Plan | None = None
        self._leaving = False
        self._paces = Paces.of(policy)
        self._inbox: deque[Received] = deque()  # to ourselves
        self._waiting: tuple[float, Received] | None = None  # an Open that came too early, and until when it is good
        self._actions: list[Action] = []
        self._now = now
        self._unix_ms = 0
        self._reset(head)

    @property
    def finished(self) -> bool:
        """Whether the run has all its tokens: no more rounds open."""
        return self.head.committed_tokens >= self.policy.stop_tokens

    @property
    def round_id(self) -> RoundId:
        """The attempt that would open next."""
        return RoundId(self.policy.run_id, self.plan.version, self.policy.fragment, self.head.round + 1, self.attempt)

    @property
    def electorate(self) -> Electorate:
        """Who decides the next round."""
        return self.plan.electorate(self.head)

    def counts(self, manifest: manifest_pb2.Manifest) -> bool:
        """Whether this result of the next round holds the snapshot of this life."""
        mine = any(item.peer_id == self.me for item in manifest.contributions)
        return mine and RoundId.from_proto(manifest.round) in self._exposed_in

    def is_freezing(self, round_id: RoundId) -> bool:
        """Whether a snapshot for that attempt is still wanted."""
        return self.phase is Phase.FREEZING and self._is_following(round_id)

    @property
    def held(self) -> tuple[bytes, ...]:
        """Payloads whose state must be kept, because they may still be committed."""
        return tuple(self._held)

    @property
    def votes(self) -> bool:
        """Whether this node's vote counts at this head: it knows all that it ever promised."""
        return self._voter

    @property
    def lagging(self) -> bool:
        """Whether a newer round than our head is known to be committed: we wait for its state, or for a recovery."""
        return self.head.round < self._known.round and self.plan.accepts(self._known)

    @property
    def in_doubt(self) -> bytes:
        """The payload that this node voted for without knowing whether it was committed; empty for none."""
        return self._voted.payload if self._voted is not None else b""

    @property
    def _tie_seconds(self) -> float:
        """What the opener may need to hear the coordinator, where there can be a tie."""
        return 1.0 if len(self.electorate.members) % 2 else TIE_SECONDS

    def step(self, event: Event, now: float, unix_ms: int = 0) -> list[Action]:
        """Take one event at monotonic time `now`; `unix_ms` only dates a Start that this step may send."""
        self._now, self._unix_ms = now, unix_ms
        self._take(event)
        while self._inbox:
            self._take(self._inbox.popleft())
        actions, self._actions = self._actions, []
        return actions

    # --- events ------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        match event:
            case Tick():
                self._tick()
            case Progress(tokens, step_seconds):
                self._tokens, self._step_seconds = tokens, step_seconds
            case Received(peer, message):
                self._receive(peer, message)
            case Frozen():
                self._froze(event)
            case Parted():
                self._parted(event)
            case Staged(round_id, layers):
                self._staged(round_id, layers)
            case Obtained(round_id, payload):
                self._obtained(round_id, payload)
            case Failed(round_id, reason):
                if self._is_following(round_id):
                    self._give_up(reason)
            case TieBreak():
                if self._opener is not None:
                    self._opener.tie_broken(event, self._now)
                    self._led()
            case PlanReceived(plan):
                self._plan_received(plan)
            case HeadMoved(head):
                self._head_moved(head)
            case Lost(peer):
                self._lost(peer)
            case Leave():
                self._leaving = True

    def _lost(self, peer: str) -> None:
        """Do not wait long for somebody who is most likely dead."""
        self._heard.pop(peer, None)
        if self._following is not None and self._following.opener == peer:
            self._following.deadline = min(self._following.deadline, self._now + _LOST_SECONDS)
        if self._opener is not None:
            self._opener.decline(peer, "its connection broke", self._now)
            self._led()

    def _plan_received(self, plan: Plan) -> None:
        if plan.version > (self._next_plan or self.plan).version:
            self._next_plan = plan
            self._adopt_plan()

    def _head_moved(self, head: Head) -> None:
        if self._following is not None:
            self._actions.append(Release(self._following.round_id, thaw=False))
        self._reset(head)
        self._adopt_plan()

    def _tick(self) -> None:
        if self._opener is not None:
            self._opener.tick(self._now)
            self._led()
        if self._following is not None and self._now >= self._following.deadline:
            self._overdue(self._following)
        self._adopt_plan()
        if self.phase is not Phase.IDLE or self.finished or self.me not in self.plan.members:
            return
        self._report_tokens()  # those who are ahead answer with their head
        if not self.lagging:
            self._open_if_due()

    def _overdue(self, following: _Following) -> None:
        if following.commit is not None:
            self._behind(f"round {following.round_id.number} was committed before our own result was ready")
        self._give_up(f"no progress in phase {self.phase.name.lower()}")

    # --- opening -----------------------------------------------------------------------------------

    def _report_tokens(self) -> None:
        self._heard[self.me] = _Heard(self._tokens, self._now, self._leaving, self._step_seconds)
        if self._now - self._reported < self.policy.report_interval.total_seconds():
            return
        self._reported = self._now
        order = self.round_id.order(self.plan.members)
        upcoming = {order[(self.attempt + ahead) % len(order)] for ahead in range(NEXT_OPENERS)}
        for peer in sorted(upcoming - {self.me}):
            self._send_report(peer)

    def _send_report(self, peer: str) -> None:
        report = dp.TokenReport(
            round=self.round_id.to_proto(),
            tokens=self._tokens,
            leaving=self._leaving,
            step_ms=min(int(self._step_seconds * 1000), 2**32 - 1),
        )
        self._send(peer, dp.RoundMessage(report=report))

    def _open_if_due(self) -> None:
        if self._opener is not None or self._now < self._not_before or self._must_wait(self.me):
            return
        if not self._is_due():
            self._due_since = None
            return
        self._due_since = self._now if self._due_since is None else self._due_since
        order = self.round_id.order(self.plan.members)
        turn = (order.index(self.me) - self.attempt) % len(order)
        before_us = {order[(self.attempt + ahead) % len(order)] for ahead in range(turn)} & self._lately()
        if self._now - self._due_since < len(before_us) * self.policy.open_timeout.total_seconds():
            return
        round_id = replace(self.round_id, attempt=self.attempt + turn)
        self._opener = Opener(
            round_id,
            self.plan,
            self.electorate,
            frozenset(self._lately()),
            self.head,
            self.policy,
            self._paces,
            self._seals,
            self._now,
            self._unix_ms,
            slowest_step=max(
                (self._heard[peer].step_seconds for peer in self._lately() & self._heard.keys()), default=0
            ),
        )
        self._led()

    def _lately(self) -> set[str]:
        """Members of the plan that were heard from at this head, lately."""
        window = _LATELY * self.policy.report_interval.total_seconds()
        heard = {peer for peer, said in self._heard.items() if self._now - said.when <= window}
        return (heard | {self.me}) & set(self.plan.members)

    def _is_due(self) -> bool:
        lately = self._lately()
        voters = lately & self.electorate.members
        if not (self.electorate.decides(voters) or self.electorate.is_half(voters)):
            return False  # nothing could be committed
        total = sum(self._heard[peer].tokens for peer in lately if peer in self._heard)
        leaving = any(self._heard[peer].leaving for peer in voters - self._left if peer in self._heard)
        began = self.head.round > self.plan.base.round
        patience = _LATELY * self.policy.report_interval.total_seconds() if began else self._paces.ready.ceiling
        everyone = self.electorate.members <= lately or self._now - self._settled_in >= patience
        overdue = self._now - self._last_commit >= self.policy.round_max.total_seconds()
        due = self.policy.due_tokens(self.head.committed_tokens, len(lately))
        return total > 0 and ((everyone and total >= due) or overdue or leaving)

    def _led(self) -> None:
        """Carry out what the attempt that we lead wants."""
        opener = self._opener
        if opener is None:
            return
        out, opener.out = opener.out, []
        if opener.done:
            self._opener = None
        for item in out:
            if isinstance(item, tuple):
                self._send(*item)
            else:
                self._actions.append(item)

    # --- messages ----------------------------------------------------------------------------------

    def _receive(self, peer: str, message: dp.RoundMessage) -> None:
        kind = message.WhichOneof("body")
        if kind is None or kind == "plan":
            return
        round_id = RoundId.from_proto(getattr(message, kind).round)
        if round_id.run_id != self.policy.run_id or round_id.fragment != self.policy.fragment:
            return
        if kind == "commit":
            self._committed(peer, message.commit)
        elif round_id.number <= self.head.round:
            self._tell_head(peer, kind)
        elif round_id.number > self.head.round + 1:
            self._heard_from_ahead(peer, round_id.number)
        elif kind == "report":
            self._token_report(peer, round_id, message.report)
        elif kind == "open":
            self._opened(peer, round_id, message)
        elif self._opener is not None and self._opener.round_id == round_id and peer in self.plan.members:
            if kind == "decline" and message.decline.plan_version == self.plan.version:
                self._declined_to = max(
                    self._declined_to, min(message.decline.attempt, self.attempt + MAX_ATTEMPT_JUMP)
                )
            self._opener.collect(peer, kind, message, self._now)
            self._led()
        if self._is_following(round_id) and self._following is not None and peer == self._following.opener:
            self._obey(self._following, kind, message)

    def _obey(self, following: _Following, kind: str, message: dp.RoundMessage) -> None:
        """A word of the opener that we follow."""
        match kind, self.phase:
            case "start", Phase.READY:
                self._started(following, message.start)
            case "settle", Phase.EXCHANGING | Phase.PARTED if following.settle is None:
                following.settle = message.settle
                self._settled(following)
            case "adopt", Phase.READY:
                self._adopt(following, message.adopt)
            case "abandon", _:
                self._release(said_so=True)

    def _token_report(self, peer: str, round_id: RoundId, report: dp.TokenReport) -> None:
        if peer not in self.plan.members:
            return
        if round_id.plan_version < self.plan.version:
            self._actions.append(SharePlan(peer))
        if round_id.plan_version == self.plan.version:
            self._reach(round_id.attempt)
        assignment = self.plan.assignment(peer)
        most = assignment.max_round_tokens if assignment else 0
        self._heard[peer] = _Heard(min(report.tokens, most), self._now, report.leaving, report.step_ms / 1000)

    def _reach(self, attempt: int) -> None:
        """Somebody cannot follow earlier attempts than this one: come nearer, a lap at a time."""
        if self.phase is not Phase.IDLE or self._opener is not None or attempt <= self.attempt:
            return
        if self._now - self._reached >= self.policy.report_interval.total_seconds() / 2:
            self._reached = self._now
            self.attempt = min(attempt, self.attempt + len(self.plan.members), MAX_ATTEMPT)

    def _opened(self, peer: str, round_id: RoundId, message: dp.RoundMessage) -> None:
        following = self._following
        if following is not None:
            if round_id.ballot <= following.round_id.ballot:
                return
            if peer != following.opener:  # wait for how ours ends
                self._wait_with(peer, message)
                return
            self._release()
        if round_id.plan_version > self.plan.version:
            self._wait_with(peer, message)
            return
        if round_id.plan_version < self.plan.version:
            self._actions.append(SharePlan(peer))
            self._decline(peer, round_id, "this member follows a newer plan")
            return
        opens = peer in self.plan.members and peer == round_id.opener(self.plan.members)
        if not opens or self.lagging:
            self._decline(peer, round_id, "this is not an attempt that this member follows")
            return
        late = round_id.attempt < self.attempt or (self._promised is not None and round_id.ballot <= self._promised)
        if late or round_id.attempt > min(MAX_ATTEMPT, self.attempt + MAX_ATTEMPT_JUMP):
            self._decline(peer, round_id, f"we stand at {self.round_id}")
            return
        if self._must_wait(peer):
            self._decline(peer, round_id, "its last attempt failed: others have their turn first")
            return
        if message.open.head_hash != self.head.hash:
            self._decline(peer, round_id, "this member's head is another manifest")
            self._behind(f"{peer} builds round {round_id.number} on another manifest than ours")
            return
        self.attempt = round_id.attempt
        seconds = min(message.open.deadline_ms / 1000, self._paces.ready.ceiling)
        deadline = self._now + 2 * seconds + self._tie_seconds
        self._following = _Following(round_id, peer, self.plan, deadline)
        if self._frozen is not None:  # seen by others in an earlier attempt: it stays this head's only snapshot
            self._promise(self._following, self._frozen)
        else:
            self.phase = Phase.FREEZING
            self._actions.append(Freeze(round_id))

    def _must_wait(self, opener: str) -> bool:
        """Whether others shall have their turn before an opener whose attempts failed."""
        return self._now < self._refused_until.get(opener, float("-inf"))

    def _wait_with(self, peer: str, message: dp.RoundMessage) -> None:
        """Keep an Open that cannot be followed yet, the highest one, as long as its opener waits."""
        ballot = RoundId.from_proto(message.open.round).ballot
        if self._waiting is not None and RoundId.from_proto(self._waiting[1].message.open.round).ballot >= ballot:
            return
        seconds = min(message.open.deadline_ms / 1000, self._paces.ready.ceiling)
        self._waiting = (self._now + seconds, Received(peer, message))

    def _heard_from_ahead(self, peer: str, number: int) -> None:
        if peer not in self.plan.members:
            return
        one_ahead = number == self.head.round + 2
        if one_ahead and self.phase in (Phase.EXCHANGING, Phase.PARTED, Phase.STAGING):
            return  # a majority was quicker than we are: our own result is on its way
        if one_ahead and self._held:
            self._send_report(peer)  # most likely what we hold was committed: the answer is that manifest
        else:
            self._behind(f"{peer} is at round {number}, we are at {self.head.round}")

    def _tell_head(self, peer: str, kind: str) -> None:
        """Somebody is behind us: tell what was committed last, once a report interval."""
        interval = self.policy.report_interval.total_seconds()
        if kind not in ("report", "open", "ready", "parts", "digest") or peer not in self.plan.members:
            return
        if self._now - self._told.get(peer, float("-inf")) < interval / 2 or not self.head.committed.signatures:
            return
        self._told[peer] = self._now
        commit = dp.Commit(round=self.head.manifest.round, manifest=self.head.committed)
        self._send(peer, dp.RoundMessage(commit=commit))

    def _committed(self, peer: str, message: dp.Commit) -> None:
        number = message.round.number
        if number <= self.head.round or peer not in self.plan.members:
            return
        following = self._following
        if number == self.head.round + 1:
            if message.manifest.payload in self._held:
                self._install(message.manifest)
                return
            staging = self.phase in (Phase.EXCHANGING, Phase.PARTED, Phase.STAGING)
            if staging and following is not None and message.round == following.round_id.to_proto():
                following.commit = message.manifest  # most likely it is what we are about to compute
                return
        self._behind(f"round {number} was committed without us")

    def _install(self, committed: manifest_pb2.CommittedManifest) -> bool:
        """Commit what we hold; False when the votes do not prove it."""
        try:
            head = self._seals.check_commit(committed, self.electorate)
        except AtollError:
            return False
        if not self.plan.accepts(head):
            return False
        following = self._following
        opened_here = following is not None and following.opener == self.me
        counted = self.counts(head.manifest)
        self._actions.append(Install(head, opened_here, counted))
        self._trusted = self._trusted or (counted and self.me in head.electorate.members)
        self._left |= {peer for peer, said in self._heard.items() if said.leaving}
        self._reset(head)
        self._adopt_plan()
        return True

    # --- following ---------------------------------------------------------------------------------

    def _froze(self, event: Frozen) -> None:
        following = self._following
        if self.phase is not Phase.FREEZING or following is None or following.round_id != event.round_id:
            return
        self._frozen = event
        self._promise(following, event)

    def _promise(self, following: _Following, frozen: Frozen) -> None:
        """Ready: we bring that many tokens, and will not vote in earlier attempts."""
        accepted = None
        if self._voted is not None:
            ballot, payload = self._voted.ballot, self._voted.payload
            named = replace(following.round_id, plan_version=ballot.plan_version, attempt=ballot.attempt)
            signature = self._seals.vote(payload, ballot)
            accepted = dp.Accepted(ballot=named.to_proto(), payload=payload, signature=signature)
        following.ready = dp.Ready(
            round=following.round_id.to_proto(),
            tokens=frozen.tokens,
            samples=frozen.samples,
            accepted=accepted,
            voter=self._voter,
            holds=sorted(map(manifest_hash, self._held)),
            leaving=self._leaving,
        )
        self.phase = Phase.READY
        self._pledge(following, dp.RoundMessage(ready=following.ready))

    def _started(self, following: _Following, message: dp.Start) -> None:
        assert following.ready is not None
        try:
            check_start(self.policy, following.plan, following.round_id, following.ready, self.me, message)
        except PeerMisbehaved as error:
            self._give_up(str(error))
            return
        seconds = min(message.deadline_ms / 1000, self._paces.exchange.ceiling)
        following.start = message
        following.deadline = self._now + seconds + _SETTLE_FLOORS * self._paces.decision.floor
        self.phase = Phase.EXCHANGING
        self._exposed_in.add(following.round_id)
        self._actions.append(RunExchange(following.round_id, message, seconds))

    def _parted(self, event: Parted) -> None:
        following = self._following
        if self.phase is not Phase.EXCHANGING or following is None or following.round_id != event.round_id:
            return
        self.phase = Phase.PARTED
        following.parts = event.digests
        parts = dp.Parts(round=event.round_id.to_proto(), digests=event.digests, partial=event.partial)
        self._send(following.opener, dp.RoundMessage(parts=parts))
        if following.settle is not None:
            self._settled(following)

    def _settled(self, following: _Following) -> None:
        if self.phase is not Phase.PARTED or following.settle is None:
            return  # our own exchange is not over yet
        assert following.start is not None
        try:
            check_settle(following.start, following.settle)
        except PeerMisbehaved as error:
            self._give_up(str(error))
            return
        if self.me in following.settle.present and any(
            held and not settled for held, settled in zip(following.parts, following.settle.digests, strict=True)
        ):
            self._give_up("Settle gives up a part that we reported to hold")
            return
        seconds = min(following.settle.deadline_ms / 1000, self._paces.decision.ceiling)
        following.deadline = self._now + seconds + self._tie_seconds
        self.phase = Phase.STAGING
        self._actions.append(Complete(following.round_id, following.settle, seconds))

    def _staged(self, round_id: RoundId, layers: tuple[manifest_pb2.LayerState, ...]) -> None:
        following = self._following
        if self.phase is not Phase.STAGING or following is None or following.round_id != round_id:
            return
        assert following.start is not None
        assert following.settle is not None
        try:
            payload = manifest_payload(
                self.policy, following.plan, self.head, following.start, following.settle, layers
            )
        except PeerMisbehaved as error:
            self._give_up(str(error))
            return
        self._hold(following, payload)

    def _adopt(self, following: _Following, message: dp.Adopt) -> None:
        """An earlier attempt's result may have been committed: vote for it, once we hold it."""
        try:
            check_payload(self.policy, self.plan, self.head, message.payload)
        except PeerMisbehaved as error:
            self._give_up(str(error))
            return
        seconds = min(message.deadline_ms / 1000, self._paces.exchange.ceiling)
        following.deadline = self._now + seconds + self._tie_seconds
        if message.payload in self._held:
            self._hold(following, message.payload)
            return
        self.phase = Phase.STAGING
        holders = tuple(peer for peer in message.holders if peer != self.me)
        self._actions.append(Obtain(following.round_id, message.payload, holders, seconds))

    def _obtained(self, round_id: RoundId, payload: bytes) -> None:
        try:
            check_payload(self.policy, self.plan, self.head, payload)
        except PeerMisbehaved:
            return  # the head moved meanwhile
        self._keep(payload)
        if self.phase is Phase.STAGING and self._following is not None and self._following.round_id == round_id:
            self._hold(self._following, payload)

    def _hold(self, following: _Following, payload: bytes) -> None:
        """We have the state that `payload` names: install it when it is committed already, else vote."""
        self._keep(payload)
        if following.commit is not None and following.commit.payload == payload and self._install(following.commit):
            return
        self.phase = Phase.VOTED
        settled = following.settle
        left_out = settled is not None and self.me not in settled.present and not self._leaving
        if not self._voter or left_out:  # nobody votes for a result that takes its voice away
            return
        ballot = following.round_id.ballot
        self._voted = Voted(ballot, payload)
        digest = dp.Digest(
            round=following.round_id.to_proto(), payload=payload, signature=self._seals.vote(payload, ballot)
        )
        self._pledge(following, dp.RoundMessage(digest=digest))

    def _keep(self, payload: bytes) -> None:
        """Its state is here. Of several that may be committed the newest are kept, and the one that we voted for."""
        self._held.pop(payload, None)
        self._held[payload] = None
        for other in list(self._held)[:-HELD]:
            if other != self.in_doubt:
                del self._held[other]

    def _pledge(self, following: _Following, message: dp.RoundMessage) -> None:
        """Send what binds us, once it is on disk."""
        if not self._voter:
            self._send(following.opener, message)
            return
        number, ballot = following.round_id.number, following.round_id.ballot
        self._promised = ballot
        self._record = VoteRecord(number, self.head.hash, ballot, self._voted)
        self._actions.append(Pledge(self._record, following.opener, message))

    def _give_up(self, reason: str) -> None:
        """This node cannot go on with the attempt: tell the opener, keep the progress."""
        following = self._following
        if following is None:
            return
        self._release()
        if following.opener == self.me and self._opener is not None:
            self._opener.decline(self.me, reason, self._now)
            self._led()
        elif following.opener != self.me:
            self._decline(following.opener, following.round_id, reason)

    def _release(self, *, said_so: bool = False) -> None:
        """Forget the current attempt; a later one has another opener. `said_so`: this one abandoned it in words."""
        following, self._following = self._following, None
        if following is None:
            return
        if not self._exposed_in:
            self._frozen = None
        self._actions.append(Release(following.round_id, thaw=not self._exposed_in))
        self.phase = Phase.IDLE
        self._due_since = None
        self._failures += 1
        self._strike(following.opener, said_so)
        first, most = _BACKOFF
        self._not_before = self._now + min(most, first * 2 ** min(self._failures - 1, 10))
        if following.round_id.number == self.head.round + 1 and following.plan.version == self.plan.version:
            self.attempt = min(MAX_ATTEMPT, max(self.attempt, following.round_id.attempt + 1, self._declined_to))
        self._adopt_plan()
        self._try_waiting()

    def _strike(self, opener: str, said_so: bool) -> None:
        first, most, most_silent = _TURNS
        self._strikes[opener] = self._strikes.get(opener, 0) + 1
        seconds = min(most if said_so else most_silent, first * 2 ** min(self._strikes[opener] - 1, 10))
        self._refused_until[opener] = self._now + seconds

    # --- where we stand ------------------------------------------------------------------------------

    def _reset(self, head: Head) -> None:
        """Begin at `head`: nothing frozen, nothing voted but what is on disk."""
        self.head = head
        if head.round > self._known.round or not self.plan.accepts(self._known):
            self._known = head
        self.phase = Phase.IDLE
        self.attempt = 0
        self._following = None
        self._opener = None
        self._tokens = 0
        self._frozen = None
        self._exposed_in = set()
        self._held = {}
        self._told = {}
        self._failures = self._declined_to = 0
        self._strikes, self._refused_until = {}, {}
        self._not_before = float("-inf")
        self._last_commit = self._now
        self._fresh_count()
        self._recall()

    def _recall(self) -> None:
        """What we promised and voted at this head before a restart; whether we can know.

        A node writes its first record when it enrols: without any, it lost its disk, and abstains until a round was
        committed in which this life took part, or a recovery made all earlier votes void. A record of a later round
        means that we stand at an older state than we once did.
        """
        self._voted = None
        self._promised = None
        record, number = self._record, self.head.round + 1
        if record is None:
            self._voter = self._trusted or self.plan.base.since_version > self._first_plan
        elif record.number < number or record.promised.plan_version < self.plan.base.since_version:
            self._voter = True
        else:
            same = record.number == number and record.head_hash == self.head.hash
            self._voter = same
            if same:
                self._voted, self._promised = record.voted, record.promised
                if record.promised.plan_version == self.plan.version:
                    self.attempt = record.promised.attempt + 1

    def _adopt_plan(self) -> None:
        if self._next_plan is None or self._following is not None or self._opener is not None:
            return
        before, self.plan, self._next_plan = self.plan, self._next_plan, None
        self.attempt = self._declined_to = 0
        self._strikes, self._refused_until = {}, {}
        if self.plan.base != before.base:  # what was voted for on the old history does not count
            self._held = {}
            self._recall()
        self._failures = 0
        self._not_before = float("-inf")
        self._fresh_count()
        if not self.plan.accepts(self.head):
            self._behind(f"plan {self.plan.version} goes on from round {self.plan.base.round}, on another history")
        self._try_waiting()

    def _fresh_count(self) -> None:
        self._heard = {}
        self._reported = float("-inf")
        self._due_since = None
        self._settled_in = self._now

    def _try_waiting(self) -> None:
        """An Open that came too early may be followed now."""
        if self._waiting is None:
            return
        until, received = self._waiting
        if received.message.open.round.plan_version > self.plan.version and self._now <= until:
            return
        self._waiting = None
        if self._now <= until:
            self._inbox.append(received)

    # --- small words -------------------------------------------------------------------------------

    def _is_following(self, round_id: RoundId) -> bool:
        return self._following is not None and self._following.round_id == round_id

    def _behind(self, reason: str) -> None:
        self._actions.append(CatchUp(reason))

    def _decline(self, peer: str, round_id: RoundId, reason: str) -> None:
        decline = dp.Decline(
            round=round_id.to_proto(), reason=reason[:500], plan_version=self.plan.version, attempt=self.attempt
        )
        self._send(peer, dp.RoundMessage(decline=decline))

    def _send(self, peer: str, message: dp.RoundMessage) -> None:
        if peer == self.me:
            self._inbox.append(Received(peer, message))
        else:
            self._actions.append(Send(peer, message))
