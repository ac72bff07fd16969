"""The outer round as a pure state machine: events in, actions out, no I/O, no clock of its own.

    IDLE ──Open──▶ FREEZING ──Frozen──▶ READY ──Start──▶ EXCHANGING ──Exchanged──▶ HOLDING ──Commit──▶ IDLE
      ▲               │                   │                  │                        │
      └───────────────┴──── abandoned ────┴──────────────────┘       no word: RESOLVING (ask the others)

Everyone is a follower; one of the first three in the round's order is also the opener. A round commits only
if every started member signed the same manifest; otherwise it is abandoned, loudly, and its progress enters
the next attempt. Training goes on in every phase.

A follower that has sent its digest is bound: it neither trains on a fork nor forgets until it knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.manifest import Head, read_head, require_signers, verify_signature
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.node.averaging.decide import build_start, check_start, manifest_payload
from atoll.node.averaging.round_types import (
    Action,
    CatchUp,
    Event,
    Exchanged,
    Failed,
    Freeze,
    Frozen,
    HeadMoved,
    Install,
    PlanReceived,
    Progress,
    Received,
    Release,
    Report,
    Resolve,
    Resolved,
    RoundPolicy,
    RunExchange,
    Send,
    Tick,
)
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

OPENERS = 3  # how many of the order may open a round
MAX_ATTEMPT_JUMP = 64  # a peer cannot push the attempt counter further than this at once


class Phase(Enum):
    """Where this node stands in a round."""

    IDLE = auto()
    FREEZING = auto()
    READY = auto()
    EXCHANGING = auto()
    HOLDING = auto()
    RESOLVING = auto()


@dataclass
class _Following:
    """The round that this node takes part in."""

    round_id: RoundId
    opener: str
    plan: Plan  # the round ends under the plan it began with
    deadline: float
    ready: dp.Ready | None = None
    start: dp.Start | None = None
    payload: bytes = b""  # the manifest that this node signed
    bound_until: float = 0.0  # before that, "nobody has the manifest" only means "not yet"


@dataclass
class _Leading:
    """What the opener collects."""

    round_id: RoundId
    plan: Plan
    opened: float
    deadline: float
    ready: dict[str, dp.Ready] = field(default_factory=dict)
    start: dp.Start | None = None
    digests: dict[str, dp.Digest] = field(default_factory=dict)


class RoundMachine:
    """One fragment's rounds on one node. Feed `step`; carry out what it returns, in order."""

    def __init__(
        self, me: str, policy: RoundPolicy, sign: Callable[[bytes], pb.Signed], head: Head, plan: Plan, now: float
    ) -> None:
        self.me = me
        self.policy = policy
        self.head = head
        self.plan = plan
        self.phase = Phase.IDLE
        self.attempt = 0
        self._sign = sign
        self._tokens = 0
        self._next_plan: Plan | None = None
        self._heard: dict[str, int] = {}  # tokens that members reported since the head
        self._last_commit = now
        self._due_since: float | None = None
        self._reported = float("-inf")
        self._following: _Following | None = None
        self._leading: _Leading | None = None
        self._inbox: deque[Received] = deque()  # to ourselves
        self._early: Received | None = None  # an Open under a plan that has not reached us yet
        self._actions: list[Action] = []
        self._now = now
        self._unix_ms = 0

    @property
    def finished(self) -> bool:
        """Whether the run has all its tokens: no more rounds open."""
        return self.head.committed_tokens >= self.policy.stop_tokens

    @property
    def round_id(self) -> RoundId:
        """The attempt that would open next."""
        return RoundId(self.policy.run_id, self.plan.version, self.policy.fragment, self.head.round + 1, self.attempt)

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
            case Progress(tokens):
                self._tokens = tokens
            case Received(peer, message):
                self._receive(peer, message)
            case Frozen():
                self._frozen(event)
            case Exchanged(round_id, layers):
                self._exchanged(round_id, layers)
            case Failed(round_id, reason):
                if self._is_following(round_id):
                    self._give_up(reason)
            case Resolved(round_id, manifest):
                self._resolved(round_id, manifest)
            case PlanReceived(plan):
                self._plan_received(plan)
            case HeadMoved(head):
                self._head_moved(head)

    def _plan_received(self, plan: Plan) -> None:
        newest = self._next_plan or self.plan
        if plan.version <= newest.version:
            return
        self._next_plan = plan
        lost = set(self._following.plan.members) - set(plan.members) if self._following else set()
        if lost and self.phase not in (Phase.HOLDING, Phase.RESOLVING):
            self._give_up(f"plan {plan.version} goes on without {len(lost)} of this round's members")
        self._adopt_plan()

    def _head_moved(self, head: Head) -> None:
        if self._following is not None:
            self._release()
        self._start_from(head)

    def _tick(self) -> None:
        if self._leading is not None and self._now >= self._leading.deadline:
            self._abandon_led(self._missing())
        following = self._following
        if following is not None and self._now >= following.deadline:
            self._overdue(following)
        if self.phase is Phase.IDLE and not self.finished and self.me in self.plan.members:
            self._report_tokens()
            self._open_if_due()

    def _overdue(self, following: _Following) -> None:
        if self.phase is Phase.HOLDING:
            self._resolve(following)
        else:
            self._give_up(f"no progress in phase {self.phase.name.lower()}")

    def _resolve(self, following: _Following) -> None:
        self.phase = Phase.RESOLVING
        following.bound_until = following.deadline
        following.deadline = float("inf")  # `Resolved` ends it
        others = tuple(peer for peer in following.plan.members if peer != self.me)
        self._actions.append(Resolve(following.round_id, others))

    # --- opening -----------------------------------------------------------------------------------

    def _report_tokens(self) -> None:
        self._heard[self.me] = self._tokens
        if self._now - self._reported < self.policy.report_interval.total_seconds():
            return
        self._reported = self._now
        message = dp.RoundMessage(report=dp.TokenReport(round=self.round_id.to_proto(), tokens=self._tokens))
        for peer in self.round_id.order(self.plan.members)[:OPENERS]:
            if peer != self.me:
                self._send(peer, message)

    def _open_if_due(self) -> None:
        if self._leading is not None:
            return
        order = self.round_id.order(self.plan.members)
        rank = order.index(self.me)
        if rank >= OPENERS or not self._is_due():
            self._due_since = None
            return
        self._due_since = self._now if self._due_since is None else self._due_since
        if self._now - self._due_since < rank * self.policy.open_timeout.total_seconds():
            return
        deadline = self._now + self.policy.ready_timeout.total_seconds()
        self._leading = _Leading(self.round_id, self.plan, self._now, deadline)
        message = dp.Open(
            round=self.round_id.to_proto(),
            head_hash=self.head.hash,
            members=order,
            deadline_ms=int(self.policy.ready_timeout.total_seconds() * 1000),
        )
        self._broadcast(self.plan, dp.RoundMessage(open=message))

    def _is_due(self) -> bool:
        total = sum(self._heard.get(peer, 0) for peer in self.plan.members)
        everyone = all(peer in self._heard for peer in self.plan.members)
        overdue = self._now - self._last_commit >= self.policy.round_max.total_seconds()
        due = self.policy.due_tokens(self.head.committed_tokens, len(self.plan.members))
        return total > 0 and ((everyone and total >= due) or overdue)

    def _start_if_ready(self, leading: _Leading) -> None:
        if set(leading.ready) != set(leading.plan.members):
            return
        if not any(ready.tokens for ready in leading.ready.values()):
            self._abandon_led("nobody had trained a token")
            return
        leading.start = build_start(self.policy, leading.plan, leading.round_id, leading.ready, self._unix_ms)
        exchange, decision = self.policy.exchange_timeout, self.policy.decision_timeout
        leading.deadline = self._now + (exchange + decision).total_seconds()
        self._broadcast(leading.plan, dp.RoundMessage(start=leading.start))

    def _commit_if_equal(self, leading: _Leading) -> None:
        following = self._following
        if set(leading.digests) != set(leading.plan.members) or following is None or not following.payload:
            return
        for peer, digest in sorted(leading.digests.items()):
            try:
                verify_signature(following.payload, digest.signature, peer)
            except AtollError:
                self._abandon_led(f"replicas differ: {peer} signed another result")
                return
        signatures = [leading.digests[peer].signature for peer in sorted(leading.digests)]
        committed = manifest_pb2.CommittedManifest(payload=following.payload, signatures=signatures)
        seconds = self._now - leading.opened
        self._leading = None
        self._actions.append(Report(leading.round_id, committed, "", seconds))
        commit = dp.Commit(round=leading.round_id.to_proto(), manifest=committed)
        self._broadcast(leading.plan, dp.RoundMessage(commit=commit))

    def _abandon_led(self, reason: str) -> None:
        leading, self._leading = self._leading, None
        if leading is None:
            return
        self._actions.append(Report(leading.round_id, None, reason, self._now - leading.opened))
        abandon = dp.Abandon(round=leading.round_id.to_proto(), reason=reason[:500])
        self._broadcast(leading.plan, dp.RoundMessage(abandon=abandon))

    def _missing(self) -> str:
        leading = self._leading
        assert leading is not None
        stage, got = ("digest", set(leading.digests)) if leading.start else ("answer", set(leading.ready))
        silent = sorted(set(leading.plan.members) - got)
        return f"no {stage} in time from {', '.join(silent)}"

    # --- messages ----------------------------------------------------------------------------------

    def _receive(self, peer: str, message: dp.RoundMessage) -> None:
        kind = message.WhichOneof("body")
        if kind is None:
            return
        round_id = RoundId.from_proto(getattr(message, kind).round)
        if round_id.run_id != self.policy.run_id or round_id.fragment != self.policy.fragment:
            return
        if round_id.number > self.head.round + 1 and peer in self.plan.members:
            if self.phase is Phase.HOLDING and self._following is not None:
                self._resolve(self._following)  # the round we hold was committed, only the word was lost
            elif self.phase is not Phase.RESOLVING:
                self._behind(f"{peer} is at round {round_id.number}, we are at {self.head.round}")
            return
        match kind:
            case "report":
                self._token_report(peer, round_id, message.report)
            case "open":
                self._opened(peer, round_id, message.open)
            case "ready":
                self._collect_ready(peer, round_id, message.ready)
            case "start":
                self._started(peer, round_id, message.start)
            case "digest":
                self._collect_digest(peer, round_id, message.digest)
            case "commit":
                self._committed(peer, round_id, message.commit)
            case "abandon":
                self._abandoned(peer, round_id, message.abandon)

    def _token_report(self, peer: str, round_id: RoundId, report: dp.TokenReport) -> None:
        current = self.round_id
        if peer not in self.plan.members or (round_id.plan_version, round_id.number) != (
            current.plan_version,
            current.number,
        ):
            return
        if self.phase is Phase.IDLE and self.attempt < round_id.attempt <= self.attempt + MAX_ATTEMPT_JUMP:
            self.attempt = round_id.attempt
        self._heard[peer] = report.tokens

    def _opened(self, peer: str, round_id: RoundId, message: dp.Open) -> None:
        following = self._following
        if following is not None:
            superseded = peer == following.opener and round_id.attempt > following.round_id.attempt
            if self.phase is Phase.HOLDING and superseded:
                self._resolve(following)  # bound: first learn what became of the round that we signed
            if not superseded or self.phase is Phase.RESOLVING:
                return  # one opener per round
            self._release()
        current = self.round_id
        if round_id.number == current.number and round_id.plan_version > current.plan_version:
            self._early = Received(peer, dp.RoundMessage(open=message))
            return
        if round_id.number != current.number or round_id.plan_version != current.plan_version:
            self._refuse(peer, round_id, f"we stand at {current}")
            return
        order = round_id.order(self.plan.members)
        if peer not in order[:OPENERS] or tuple(message.members) != order:
            self._refuse(peer, round_id, "the opener or its member list does not follow from the plan")
            return
        if not self.attempt <= round_id.attempt <= self.attempt + MAX_ATTEMPT_JUMP:
            self._refuse(peer, round_id, f"we stand at {current}")
            return
        if message.head_hash != self.head.hash:
            self._behind(f"{peer} builds round {round_id.number} on another manifest than ours")
            return
        self.attempt = round_id.attempt
        deadline = self._now + self.policy.ready_timeout.total_seconds() * 2
        self._following = _Following(round_id, peer, self.plan, deadline)
        self.phase = Phase.FREEZING
        self._actions.append(Freeze(round_id))

    def _collect_ready(self, peer: str, round_id: RoundId, message: dp.Ready) -> None:
        leading = self._leading
        if leading is None or leading.round_id != round_id or leading.start or peer not in leading.plan.members:
            return
        leading.ready[peer] = message
        self._start_if_ready(leading)

    def _started(self, peer: str, round_id: RoundId, message: dp.Start) -> None:
        following = self._following
        if self.phase is not Phase.READY or following is None or following.ready is None:
            return
        if (peer, round_id) != (following.opener, following.round_id):
            return
        try:
            check_start(self.policy, following.plan, round_id, following.ready, self.me, message)
        except PeerMisbehaved as error:
            self._give_up(str(error))
            return
        following.start = message
        following.deadline = self._now + self.policy.exchange_timeout.total_seconds()
        self.phase = Phase.EXCHANGING
        self._actions.append(RunExchange(round_id, message))

    def _collect_digest(self, peer: str, round_id: RoundId, message: dp.Digest) -> None:
        leading = self._leading
        if leading is None or leading.round_id != round_id or peer not in leading.plan.members:
            return
        leading.digests[peer] = message
        self._commit_if_equal(leading)

    def _committed(self, peer: str, round_id: RoundId, message: dp.Commit) -> None:
        following = self._following
        if following is not None and following.round_id == round_id and following.payload:
            if message.manifest.payload == following.payload:
                self._install(following, message.manifest)  # anything else decides nothing: the deadline asks
        elif peer in self.plan.members and round_id.number == self.head.round + 1:
            self._behind(f"round {round_id} was committed without us")

    def _abandoned(self, peer: str, round_id: RoundId, message: dp.Abandon) -> None:
        leading = self._leading
        if leading is not None and leading.round_id == round_id and peer != self.me:
            if peer in leading.plan.members:
                self._abandon_led(f"{peer}: {message.reason}")
        elif self._is_following(round_id) and self._following is not None and peer == self._following.opener:
            self._release()

    # --- following ---------------------------------------------------------------------------------

    def _frozen(self, event: Frozen) -> None:
        following = self._following
        if following is None or following.round_id != event.round_id or self.phase is not Phase.FREEZING:
            return
        following.ready = dp.Ready(round=event.round_id.to_proto(), tokens=event.tokens, samples=event.samples)
        self.phase = Phase.READY
        self._send(following.opener, dp.RoundMessage(ready=following.ready))

    def _exchanged(self, round_id: RoundId, layers: tuple[manifest_pb2.LayerState, ...]) -> None:
        following = self._following
        if self.phase is not Phase.EXCHANGING or following is None or following.round_id != round_id:
            return
        assert following.start is not None
        try:
            payload = manifest_payload(self.policy, following.plan, self.head, following.start, layers)
        except PeerMisbehaved as error:
            self._give_up(str(error))
            return
        following.payload = payload
        self.phase = Phase.HOLDING
        if self._leading is not None and self._leading.round_id == round_id:
            following.deadline = float("inf")  # the opener decides itself, by the deadline below
            self._leading.deadline = self._now + self.policy.decision_timeout.total_seconds()
        else:  # the opener may need all of its time for the exchange before it can decide
            following.deadline += self.policy.decision_timeout.total_seconds()
        digest = dp.Digest(round=round_id.to_proto(), layers=layers, signature=self._sign(payload))
        self._send(following.opener, dp.RoundMessage(digest=digest))

    def _resolved(self, round_id: RoundId, manifest: manifest_pb2.CommittedManifest | None) -> None:
        following = self._following
        if self.phase is not Phase.RESOLVING or following is None or following.round_id != round_id:
            return
        if manifest is not None and self._install(following, manifest):
            return
        if self._now < following.bound_until:
            self.phase, following.deadline = Phase.HOLDING, following.bound_until
        else:
            self._release()

    def _install(self, following: _Following, committed: manifest_pb2.CommittedManifest) -> bool:
        """Commit what we hold; False when the manifest does not prove it."""
        try:
            head = read_head(committed, self.policy.run_id)
            require_signers(head, following.plan.members)
        except AtollError:
            return False
        if committed.payload != following.payload:
            self._behind(f"round {following.round_id} committed another result than ours")
            return False
        opened_here = following.opener == self.me
        self._actions.append(Install(following.round_id, head, opened_here))
        self._following = None
        self._start_from(head)
        return True

    def _give_up(self, reason: str) -> None:
        """This node cannot go on with the round: tell the opener, keep the progress."""
        following = self._following
        if following is None:
            return
        if following.opener == self.me:
            self._abandon_led(reason)
        else:
            self._refuse(following.opener, following.round_id, reason)
            self._release()

    def _release(self) -> None:
        """Forget the current round; the next attempt has another order."""
        following, self._following = self._following, None
        if following is None:
            return
        self._actions.append(Release(following.round_id))
        self.phase = Phase.IDLE
        self._due_since = None
        if following.round_id.number == self.head.round + 1 and following.plan.version == self.plan.version:
            self.attempt = max(self.attempt, following.round_id.attempt + 1)
        self._adopt_plan()

    def _start_from(self, head: Head) -> None:
        self.head = head
        self.phase = Phase.IDLE
        self.attempt = 0
        self._following = None
        self._leading = None
        self._tokens = 0
        self._fresh_count()
        self._last_commit = self._now
        self._adopt_plan()

    def _adopt_plan(self) -> None:
        if self._next_plan is None or self.phase is not Phase.IDLE or self._following is not None:
            return
        self.plan, self._next_plan = self._next_plan, None
        self.attempt = 0
        self._fresh_count()
        if self._early is not None:
            self._inbox.append(self._early)
            self._early = None

    def _fresh_count(self) -> None:
        self._heard = {}
        self._reported = float("-inf")
        self._due_since = None

    # --- small words -------------------------------------------------------------------------------

    def _is_following(self, round_id: RoundId) -> bool:
        return self._following is not None and self._following.round_id == round_id

    def _behind(self, reason: str) -> None:
        self._actions.append(CatchUp(reason))

    def _refuse(self, peer: str, round_id: RoundId, reason: str) -> None:
        abandon = dp.Abandon(round=round_id.to_proto(), reason=reason[:500])
        self._send(peer, dp.RoundMessage(abandon=abandon))

    def _broadcast(self, plan: Plan, message: dp.RoundMessage) -> None:
        for peer in plan.members:
            self._send(peer, message)

    def _send(self, peer: str, message: dp.RoundMessage) -> None:
        if peer == self.me:
            self._inbox.append(Received(peer, message))
        else:
            self._actions.append(Send(peer, message))
