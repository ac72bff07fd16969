"""The outer round as a pure state machine: events in, actions out, no I/O, no clock of its own.

    IDLE ─Open─▶ FREEZING ─▶ READY ─Start─▶ EXCHANGING ─▶ AWAITING_SETTLE ─Settle─▶ STAGING ─▶ AWAITING_COMMIT ─▶ IDLE
                               └──── Propose: an earlier attempt's result may be committed ────▲

Every member follows an attempt (attendance.py, follower.py). The attempt's number names the seat that may lead it
(opener.py) once a round is due (round_trigger.py). promises.py records what a member promised, voted for and holds. All
these parts share standing.py. own_reports.py reports a member's position to others. A round commits with the votes of a
majority of the seats that the previous manifest names (core/quorum.py). Attempts are ballots of Paxos. Ready is the
promise; Propose and Vote are the second phase. If an earlier result may have been committed, an attempt proposes that
result. docs/explain/rounds.md draws the protocol and its failures.

Training continues in every phase. At one head, all attempts get the same snapshot of this node's progress. So no
contribution is counted twice, whichever attempt commits (snapshot_ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.quorum import Promised, VoteRecord
from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.attendance import Attendance
from atoll.node.rounds.decide import check_payload, is_witness
from atoll.node.rounds.member_answers import MemberAnswers
from atoll.node.rounds.opener import Opener
from atoll.node.rounds.own_reports import OwnReports
from atoll.node.rounds.standing import Standing
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

_OPENER_KINDS = frozenset({"open", "start", "settle", "propose", "abandon"})


class RoundMachine:
    """The rounds of a run on one node. Call `step` with each event; carry out the returned actions in order.

    It has many methods: one for each kind of event and message, and the properties that the engine reads.
    """

    def __init__(
        self,
        me: str,
        policy_of: rt.PolicyOf,
        signer: rt.VoteSigner,
        head: Head,
        plan: Plan,
        now: float,
        record: VoteRecord | None = None,
        known: Head | None = None,
        *,
        draw_mark: Callable[[], bytes],
        told: Promised | None = None,
    ) -> None:
        self._at = Standing(me, policy_of, head, plan, now, record, known, draw_mark, told)
        self._reports = OwnReports(self._at)
        self._attendance = Attendance(
            self._at,
            signer,
            install=self._install,
            report_ahead=self._reports.send_ahead,
            released=self._adopt_plan,
        )
        self._signer = signer
        self._opener: Opener | None = None
        self._next_plan: Plan | None = None
        self._unix_ms = 0

    @property
    def head(self) -> Head:
        """The newest round that is installed here."""
        return self._at.head

    @property
    def plan(self) -> Plan:
        """The plan that rounds run under now."""
        return self._at.plan

    @property
    def policy(self) -> rt.RoundPolicy:
        """The round policy of the current plan."""
        return self._at.policy

    @property
    def phase(self) -> rt.Phase:
        """A node's part in a round."""
        return self._attendance.phase

    @property
    def finished(self) -> bool:
        """Whether the run has all its tokens. Then no more rounds open."""
        return self._at.finished

    @property
    def round_id(self) -> RoundId:
        """The attempt that would open next."""
        return self._at.round_id

    @property
    def openers(self) -> tuple[str, ...]:
        """The members that may open the next round, in order."""
        return self._at.openers

    @property
    def void(self) -> bool:
        """Whether a recovery made our head void.

        Then this node takes part in no round until it fetched another head.
        """
        return self._at.void

    def is_freezing(self, round_id: RoundId) -> bool:
        """Whether the attempt `round_id` still needs a snapshot."""
        return self._attendance.is_freezing(round_id)

    def counted(self, manifest: manifest_pb2.Manifest) -> rt.Counted:
        """What of this process's progress the next round's result `manifest` contains."""
        return self._at.ledger.counted(self._at.me, manifest)

    @property
    def held(self) -> tuple[bytes, ...]:
        """Payloads of results that may still be committed, so their state must be kept."""
        return tuple(self._at.promises.held)

    @property
    def votes(self) -> bool:
        """Whether this node may vote at this head: it knows all its earlier promises."""
        return self._at.promises.votes

    @property
    def abstains(self) -> bool:
        """Whether this node has a seat but does not vote."""
        return self._at.me in self.openers and not self.votes

    @property
    def in_doubt(self) -> bytes:
        """The payload that this node voted for and that may or may not be committed; empty if none."""
        return self._at.promises.in_doubt

    def step(self, event: rt.Event, now: float, unix_ms: int = 0) -> list[rt.Action]:
        """Process one event at monotonic time `now`. `unix_ms` is the date in a Start that this step may send."""
        self._at.now, self._unix_ms = now, unix_ms
        self._take(event)
        while self._at.inbox:
            self._take(self._at.inbox.popleft())
        actions, self._at.actions = self._at.actions, []
        return actions

    # --- events ------------------------------------------------------------------------------------

    def _take(self, event: rt.Event) -> None:
        match event:
            case rt.Tick():
                self._tick()
            case rt.Progress():
                self._reports.take(event)
            case rt.Received(peer, message):
                self._receive(peer, message)
            case rt.Frozen():
                if self._attendance.froze(event):
                    self._reports.froze()
            case rt.ExchangeDone():
                self._attendance.exchange_done(event)
            case rt.Staged(round_id, layers):
                self._attendance.staged(round_id, layers)
            case rt.Failed(round_id, reason, disputes):
                self._at.suspicions.note(disputes, round_id.number)
                if self._attendance.follows(round_id):
                    self._attendance.give_up(reason)
            case rt.PledgeFailed(message):
                self._attendance.pledge_failed(message)
            case rt.SendFailed(message, reason):
                self._on_send_failed(message, reason)
            case rt.CoordinatorVote():
                if self._opener is not None:
                    self._opener.coordinator_answered(event, self._at.now)
                    self._drain_opener()
            case rt.PlanReceived(plan):
                self._plan_received(plan)
            case rt.HeadMoved(head):
                self._head_moved(head)
            case rt.Lost(peer):
                self._lost(peer)
            case rt.Leave():
                self._at.leaving = True

    def _lost(self, peer: str) -> None:
        """Shorten waits for a member whose connection broke."""
        self._at.trigger.lose(peer)
        self._attendance.lost(peer)
        if self._opener is not None:
            self._opener.decline(peer, "its connection broke", self._at.now)
            self._drain_opener()

    def _plan_received(self, plan: Plan) -> None:
        if plan.version > (self._next_plan or self._at.plan).version:
            self._next_plan = plan
            self._adopt_plan()

    def _head_moved(self, head: Head) -> None:
        if self._attendance.following is not None:
            self._at.actions.append(rt.Release(self._attendance.following.round_id, thaw=False))
        self._supersede(f"this node moved to round {head.round}")
        for paces in self._at.paces_by_fragment:
            paces.codec.forget_round()
        self._at.trigger.forget_exchange()
        self._move(head)
        self._at.check_history()  # a recovery may have made the head void during the fetch
        self._adopt_plan()
        self._reports.send()  # a round probably runs without us, and the next may wait for our report
        self._attendance.try_waiting()

    def _tick(self) -> None:
        if self._opener is not None:
            self._opener.tick(self._at.now)
            self._drain_opener()
        self._attendance.tick()
        self._adopt_plan()
        if self._is_between_rounds:
            self._reports.send_if_due()
            self._open_if_due()

    # --- opening -----------------------------------------------------------------------------------

    @property
    def _is_between_rounds(self) -> bool:
        """Whether this node waits for the next round to open."""
        return self.phase is rt.Phase.IDLE and not self._at.finished and self._at.me in self._at.plan.members

    def _open_if_due(self) -> None:
        if self._at.lagging or self._at.void or self._opener is not None:
            return
        attempt = self._at.trigger.attempt_to_open(
            self._at.round_id, self._at.now, self._at.paces.answers.median_seconds
        )
        if attempt is None:
            return
        answers = MemberAnswers(
            replace(self._at.round_id, attempt=attempt),
            self._at.plan,
            self._at.plan.electorate(self._at.head),
            self._at.trigger.heard_recently(self._at.now),
            self._at.head,
            self._at.policy,
            self._signer,
            liars=self._at.suspicions.liars(self._at.round_id.number) - {self._at.me},
            poor_reducers=self._at.suspicions.poor_reducers(self._at.round_id.number),
            marks=self._at.marks,
        )
        self._opener = Opener(
            answers,
            self._at.paces,
            self._at.now,
            self._unix_ms,
            slowest_step=self._at.trigger.slowest_step(self._at.now),
            enough_since=self._at.trigger.enough_since,
        )
        self._drain_opener()

    def _drain_opener(self) -> None:
        """Carry out the messages and actions of the attempt that this node leads."""
        opener = self._opener
        if opener is not None:
            if opener.done:
                self._opener = None
            self._at.carry_out(opener)

    def _supersede(self, reason: str) -> None:
        """End the attempt that this node leads, because the head moves."""
        if self._opener is not None:
            self._opener.supersede(reason, self._at.now)
            self._drain_opener()

    # --- messages ----------------------------------------------------------------------------------

    def _receive(self, peer: str, message: dp.RoundMessage) -> None:
        kind = message.WhichOneof("body")
        if kind is None or kind == "plan":
            return
        round_id = RoundId.from_proto(getattr(message, kind).round)
        fragment = self._at.policy.fragment_of(round_id.number)
        odd = round_id.plan_version == self._at.plan.version and round_id.fragment != fragment.index
        if odd or round_id.run_id != self._at.policy.run_id:
            return
        if kind == "commit":
            self._committed(peer, message.commit)
        elif round_id.number <= self._at.head.round:
            if kind == "report" and peer in self._at.plan.members:
                self._at.trigger.hear_behind(peer, message.report, self._at.now)
            self._reports.tell_head(peer, kind)
        elif round_id.number > self._at.head.round + 1:
            self._received_ahead(peer, round_id, kind, message)
        elif kind == "report":
            self._token_report(peer, round_id, message.report)
        elif kind == "open":
            self._attendance.opened(peer, round_id, message)
        elif self._opener is not None and self._opener.round_id == round_id and peer in self._at.plan.members:
            if kind == "decline":
                self._declined(self._opener, peer, message.decline)
            self._opener.collect(peer, kind, message, self._at.now)
            self._drain_opener()
        self._attendance.hear(peer, round_id, kind, message)

    def _declined(self, opener: Opener, peer: str, decline: dp.Decline) -> None:
        if decline.plan_version == self._at.plan.version:
            if peer in self._at.openers:  # the declines of other members do not matter
                self._at.trigger.declined(self._at.attempt, decline.attempt)
            return
        newer = decline.plan_version > self._at.plan.version
        if newer and opener.may_give_way_to(peer) and self._at.trigger.awaits_newer_plan(peer):
            opener.give_way(f"{peer} follows plan {decline.plan_version} already", self._at.now)

    def _token_report(self, peer: str, round_id: RoundId, report: dp.TokenReport) -> None:
        if peer not in self._at.plan.members:
            return
        if round_id.plan_version < self._at.plan.version:
            self._at.actions.append(rt.SharePlan(peer))
        waits = self.phase is rt.Phase.IDLE and self._opener is None and peer in self._at.openers
        if waits and round_id.plan_version == self._at.plan.version:
            self._at.attempt = self._at.trigger.reach(self._at.attempt, round_id.attempt, self._at.now)
        self._at.trigger.hear(peer, report, self._at.now)
        if self._is_between_rounds:
            self._open_if_due()

    def _received_ahead(self, peer: str, round_id: RoundId, kind: str, message: dp.RoundMessage) -> None:
        """Process a message of a round after the next. The next round is probably about to be committed here too."""
        if peer not in self._at.plan.members:
            return
        one_ahead = round_id.number == self._at.head.round + 2
        if one_ahead and kind == "report" and message.report.expected:
            self._at.trigger.expect(peer, round_id, message.report, self._at.now)
            return
        if kind == "open" and round_id.plan_version == self._at.plan.version:
            self._attendance.wait_ahead(peer, message)
        self._heard_from_ahead(peer, round_id.number)

    def _heard_from_ahead(self, peer: str, number: int) -> None:
        one_ahead = number == self._at.head.round + 2
        if one_ahead and self.phase in (rt.Phase.EXCHANGING, rt.Phase.AWAITING_SETTLE, rt.Phase.STAGING):
            return  # others were faster; our own result is about to be ready
        if one_ahead and (self._at.promises.held or self.phase is rt.Phase.AWAITING_COMMIT):
            self._reports.send_to(peer)  # our result was probably committed; the answer to this report is its manifest
        else:
            self._at.behind(f"{peer} is at round {number}, we are at {self._at.head.round}")

    def _committed(self, peer: str, message: dp.Commit) -> None:
        number = message.round.number
        if number <= self._at.head.round or peer not in self._at.plan.members:
            return
        following = self._attendance.following
        if number == self._at.head.round + 1:
            if message.manifest.payload in self._at.promises.held or self._witnesses(message.manifest.payload):
                self._install(message.manifest)
                return
            staging = self.phase in (rt.Phase.EXCHANGING, rt.Phase.AWAITING_SETTLE, rt.Phase.STAGING)
            if staging and following is not None and message.round == following.round_id.to_proto():
                following.commit = message.manifest  # probably the result that we are about to compute
                return
        self._at.behind(f"round {number} was committed without us")

    def _witnesses(self, payload: bytes) -> bool:
        """Whether `payload` can be the next round's result and changes no layer that we hold."""
        try:
            check_payload(self._at.policy, self._at.plan, self._at.head, payload)
            return is_witness(self._at.plan, self._at.me, payload)
        except PeerMisbehaved:
            return False

    def _install(self, committed: manifest_pb2.CommittedManifest) -> bool:
        """Commit a result that we hold. Returns False if its votes do not suffice."""
        try:
            head = self._signer.check_commit(committed, self._at.plan.electorate(self._at.head))
        except AtollError:
            return False
        if not self._at.plan.accepts(head) or self._at.void:
            return False
        opened_here = self._attendance.following is not None and self._attendance.following.opener == self._at.me
        counted = self.counted(head.manifest)
        self._at.actions.append(rt.Install(head, opened_here, counted))
        self._at.trigger.serve_leaving()
        self._supersede(f"round {head.round} was committed in another attempt")
        self._move(head)
        self._adopt_plan()
        self._attendance.try_waiting()
        return True

    def _move(self, head: Head) -> None:
        """Start again at `head`."""
        self._attendance.end()
        self._opener = None
        self._reports.move()
        self._at.move(head)

    def _on_send_failed(self, message: dp.RoundMessage, reason: str) -> None:
        """End the attempt whose message could not be sent. The round log gets the reason."""
        kind = str(message.WhichOneof("body"))
        if kind in ("plan", "report", "commit"):
            return  # these belong to no running attempt
        round_id = RoundId.from_proto(getattr(message, kind).round)
        if self._opener is not None and self._opener.round_id == round_id and kind in _OPENER_KINDS:
            self._opener.give_way(reason, self._at.now)
            self._drain_opener()
        elif self._attendance.follows(round_id):
            self._attendance.give_up(reason)

    def _adopt_plan(self) -> None:
        """Adopt a newer plan, if no attempt is under way."""
        if self._next_plan is None or self._attendance.following is not None or self._opener is not None:
            return
        plan, self._next_plan = self._next_plan, None
        self._at.adopt(plan)
        self._attendance.try_waiting()
