"""The outer round as a pure state machine: events in, actions out, no I/O, no clock of its own.

    IDLE ─Open─▶ FREEZING ─▶ READY ─Start─▶ EXCHANGING ─▶ AWAITING_SETTLE ─Settle─▶ STAGING ─▶ AWAITING_COMMIT ─▶ IDLE
                               └──── Propose: an earlier attempt's result may be committed ────▲

Everyone follows (follower.py); the attempt's number names the seat that also leads it (opener.py), when a round is due
and it is its turn (round_trigger.py). What a member promised, voted for and holds is its memory (promises.py).
A round commits with the votes of a majority of the seats that the manifest before it names (core/quorum.py). Attempts
are ballots of Paxos: a seat's Ready is the promise, Propose and Vote are the second phase, and an attempt that learns
of an earlier result which may have been committed proposes that one. docs/explain/rounds.md draws it, with the
failures.

Training goes on in every phase. At one head one snapshot of this node's progress leaves it, in whichever attempts, so
no contribution can be counted twice whatever becomes of them (snapshot_ledger.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.quorum import COORDINATOR, VoteRecord
from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.answers import Answers
from atoll.node.rounds.decide import check_payload, is_witness
from atoll.node.rounds.follower import Follower
from atoll.node.rounds.opener import COORDINATOR_SECONDS, Opener
from atoll.node.rounds.pending_opens import PendingOpens
from atoll.node.rounds.promises import Promises
from atoll.node.rounds.round_trigger import MAX_ATTEMPT, MAX_ATTEMPT_JUMP, RoundTrigger
from atoll.node.rounds.snapshot_ledger import SnapshotLedger
from atoll.node.rounds.stage_deadlines import StageDeadlines
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

_OPENER_KINDS = frozenset({"open", "start", "settle", "propose", "abandon"})
_LOST_SECONDS = 1.0  # an opener whose connection broke has that long to say something


class RoundMachine:
    """A run's rounds on one node. Feed `step`; carry out what it returns, in order."""

    # what belongs to the head; `_reset` begins it anew
    _following: Follower | None
    _opener: Opener | None
    _snapshot_ledger: SnapshotLedger
    _head_sent_at: dict[str, float]  # peers that heard our head from us, and when

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
    ) -> None:
        self.me = me
        self.policy = policy = policy_of(plan)
        self.head = head
        self.plan = plan
        self.attempt = 0  # the next one
        self._policy_of = policy_of
        self._signer = signer
        self._promises = Promises(record, head, plan)
        self._trigger = RoundTrigger(me, policy, head, plan, now)
        self._known = known or head  # the newest that this node ever saw committed
        self._tokens = self._tokens_since_snapshot = 0  # since the head; since the snapshot
        self._step_seconds = 0.0
        self._next_plan: Plan | None = None
        self._leaving = False
        self._paces_by_fragment = StageDeadlines.of(policy)
        self._inbox: deque[rt.Received] = deque()  # to ourselves
        self._pending_opens = PendingOpens()
        self._actions: list[rt.Action] = []
        self._now = now
        self._unix_ms = 0
        self._reset(head)

    @property
    def phase(self) -> rt.Phase:
        """Where this node stands in a round."""
        return self._following.phase if self._following is not None else rt.Phase.IDLE

    @property
    def finished(self) -> bool:
        """Whether the run has all its tokens: no more rounds open."""
        return self.head.committed_tokens >= self.policy.stop_tokens

    @property
    def round_id(self) -> RoundId:
        """The attempt that would open next."""
        number = self.head.round + 1
        fragment = self.policy.fragment_of(number).index
        return RoundId(self.policy.run_id, self.plan.version, fragment, number, self.attempt)

    @property
    def openers(self) -> tuple[str, ...]:
        """Who may open the next round, in their order."""
        return self.plan.openers(self.head)

    def counted(self, manifest: manifest_pb2.Manifest) -> rt.Counted:
        """What of this node's progress, of this life, a result of the next round holds."""
        return self._snapshot_ledger.counted(self.me, manifest)

    def is_freezing(self, round_id: RoundId) -> bool:
        """Whether a snapshot for that attempt is still wanted."""
        return self.phase is rt.Phase.FREEZING and self._is_following(round_id)

    @property
    def held(self) -> tuple[bytes, ...]:
        """Payloads whose state must be kept, because they may still be committed."""
        return tuple(self._promises.held)

    @property
    def votes(self) -> bool:
        """Whether this node's vote counts at this head: it knows all that it ever promised."""
        return self._promises.votes

    @property
    def lagging(self) -> bool:
        """Whether a newer round than our head is known to be committed: we wait for its state, or for a recovery."""
        return self.head.round < self._known.round and self.plan.accepts(self._known)

    @property
    def void(self) -> bool:
        """Whether a recovery made our head void: we take part in nothing until we fetched another."""
        return not self.plan.accepts(self.head)

    @property
    def in_doubt(self) -> bytes:
        """The payload that this node voted for without knowing whether it was committed; empty for none."""
        return self._promises.in_doubt

    @property
    def _paces(self) -> StageDeadlines:
        """Of the next round's fragment."""
        return self._paces_by_fragment[self.policy.fragment_of(self.head.round + 1).index]

    @property
    def _coordinator_seconds(self) -> float:
        """What the opener may need to hear the coordinator, where that has a seat."""
        return COORDINATOR_SECONDS if COORDINATOR in self.plan.seats(self.head) else 1.0

    def step(self, event: rt.Event, now: float, unix_ms: int = 0) -> list[rt.Action]:
        """Take one event at monotonic time `now`; `unix_ms` only dates a Start that this step may send."""
        self._now, self._unix_ms = now, unix_ms
        self._take(event)
        while self._inbox:
            self._take(self._inbox.popleft())
        actions, self._actions = self._actions, []
        return actions

    # --- events ------------------------------------------------------------------------------------

    def _take(self, event: rt.Event) -> None:
        match event:
            case rt.Tick():
                self._tick()
            case rt.Progress(tokens, step_seconds, tokens_since_snapshot):
                self._tokens, self._step_seconds, self._tokens_since_snapshot = (
                    tokens,
                    step_seconds,
                    tokens_since_snapshot,
                )
            case rt.Received(peer, message):
                self._receive(peer, message)
            case rt.Frozen():
                self._froze(event)
            case rt.ExchangeDone():
                self._on_exchange_done(event)
            case rt.Staged(round_id, layers):
                self._staged(round_id, layers)
            case rt.Failed(round_id, reason):
                if self._is_following(round_id):
                    self._give_up(reason)
            case rt.PledgeFailed(message):
                self._on_pledge_failed(message)
            case rt.SendFailed(message, reason):
                self._on_send_failed(message, reason)
            case rt.CoordinatorVote():
                if self._opener is not None:
                    self._opener.coordinator_answered(event, self._now)
                    self._drain_opener()
            case rt.PlanReceived(plan):
                self._plan_received(plan)
            case rt.HeadMoved(head):
                self._head_moved(head)
            case rt.Lost(peer):
                self._lost(peer)
            case rt.Leave():
                self._leaving = True

    def _lost(self, peer: str) -> None:
        """Do not wait long for somebody who is most likely dead."""
        self._trigger.lose(peer)
        if self._following is not None and self._following.opener == peer:
            self._following.deadline = min(self._following.deadline, self._now + _LOST_SECONDS)
        if self._opener is not None:
            self._opener.decline(peer, "its connection broke", self._now)
            self._drain_opener()

    def _plan_received(self, plan: Plan) -> None:
        if plan.version > (self._next_plan or self.plan).version:
            self._next_plan = plan
            self._adopt_plan()

    def _head_moved(self, head: Head) -> None:
        if self._following is not None:
            self._actions.append(rt.Release(self._following.round_id, thaw=False))
        self._supersede(f"this node moved to round {head.round}")
        for paces in self._paces_by_fragment:
            paces.codec.forget_round()
        self._trigger.forget_exchange()
        self._reset(head)
        self._check_history()  # a recovery may have made it void while it was fetched
        self._adopt_plan()
        for peer in self._other_openers:  # most likely a round is under way without us, and the next may wait
            self._send_report(peer)
        self._try_waiting()

    def _tick(self) -> None:
        if self._opener is not None:
            self._opener.tick(self._now)
            self._drain_opener()
        if self._following is not None and self._now >= self._following.deadline:
            self._overdue(self._following)
        self._adopt_plan()
        if self._is_between_rounds:
            self._report_tokens()  # those who are ahead answer with their head
            self._open_if_due()

    def _overdue(self, following: Follower) -> None:
        if following.commit is not None:
            self._behind(f"round {following.round_id.number} was committed before our own result was ready")
        self._give_up(f"no progress in phase {self.phase.name.lower()}")

    # --- opening -----------------------------------------------------------------------------------

    def _report_tokens(self) -> None:
        if not self._trigger.hear_self(self._tokens, self._leaving, self._step_seconds, self._now):
            return
        if self.void:
            self._check_history()
        for peer in self._other_openers:
            self._send_report(peer)

    @property
    def _other_openers(self) -> list[str]:
        return [peer for peer in self.openers if peer != self.me]

    def _send_report(self, peer: str) -> None:
        report = self._report_of(self.round_id, self._tokens)
        report.leaving = self._leaving
        self._send(peer, dp.RoundMessage(report=report))

    def _report_of(self, round_id: RoundId, tokens: int) -> dp.TokenReport:
        step_ms = min(int(self._step_seconds * 1000), 2**32 - 1)
        return dp.TokenReport(round=round_id.to_proto(), tokens=tokens, step_ms=step_ms)

    def _report_ahead(self) -> None:
        """With our vote: what is left when it is committed, so that the next opener need not ask for it then."""
        number = self.head.round + 2
        fragment = self.policy.fragment_of(number).index
        expected = RoundId(self.policy.run_id, self.plan.version, fragment, number, 0)
        report = self._report_of(expected, self._tokens_since_snapshot)
        report.expected = True
        for peer in self._other_openers:
            self._send(peer, dp.RoundMessage(report=report))

    @property
    def _is_between_rounds(self) -> bool:
        """Whether a round is what comes next here."""
        return self.phase is rt.Phase.IDLE and not self.finished and self.me in self.plan.members

    def _open_if_due(self) -> None:
        if self.lagging or self.void or self._opener is not None:
            return
        attempt = self._trigger.attempt_to_open(self.round_id, self._now, self._paces.answers.median_seconds)
        if attempt is None:
            return
        answers = Answers(
            replace(self.round_id, attempt=attempt),
            self.plan,
            self.plan.electorate(self.head),
            self._trigger.heard_recently(self._now),
            self.head,
            self.policy,
            self._signer,
        )
        self._opener = Opener(
            answers,
            self._paces,
            self._now,
            self._unix_ms,
            slowest_step=self._trigger.slowest_step(self._now),
            enough_since=self._trigger.enough_since,
        )
        self._drain_opener()

    def _drain_opener(self) -> None:
        """Carry out what the attempt that we lead wants."""
        opener = self._opener
        if opener is not None:
            if opener.done:
                self._opener = None
            self._carry_out(opener)

    def _supersede(self, reason: str) -> None:
        """The head moves under the attempt that we lead."""
        if self._opener is not None:
            self._opener.supersede(reason, self._now)
            self._drain_opener()

    def _carry_out(self, attempt: Opener | Follower) -> None:
        out, attempt.out = attempt.out, []
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
        fragment = self.policy.fragment_of(round_id.number)
        odd = round_id.plan_version == self.plan.version and round_id.fragment != fragment.index
        if odd or round_id.run_id != self.policy.run_id:
            return
        if kind == "commit":
            self._committed(peer, message.commit)
        elif round_id.number <= self.head.round:
            self._tell_head(peer, kind)
        elif round_id.number > self.head.round + 1:
            self._received_ahead(peer, round_id, kind, message)
        elif kind == "report":
            self._token_report(peer, round_id, message.report)
        elif kind == "open":
            self._opened(peer, round_id, message)
        elif self._opener is not None and self._opener.round_id == round_id and peer in self.plan.members:
            if kind == "decline":
                self._declined(self._opener, peer, message.decline)
            self._opener.collect(peer, kind, message, self._now)
            self._drain_opener()
        if self._is_following(round_id) and self._following is not None and peer == self._following.opener:
            self._on_opener_message(self._following, kind, message)

    def _declined(self, opener: Opener, peer: str, decline: dp.Decline) -> None:
        if decline.plan_version == self.plan.version:
            self._trigger.declined(self.attempt, decline.attempt)
            return
        newer = decline.plan_version > self.plan.version
        if newer and opener.may_give_way_to(peer) and self._trigger.awaits_newer_plan(peer):
            opener.give_way(f"{peer} follows plan {decline.plan_version} already", self._now)

    def _on_opener_message(self, following: Follower, kind: str, message: dp.RoundMessage) -> None:
        """A word of the opener that we follow."""
        match kind, self.phase:
            case "start", rt.Phase.READY:
                self._try(following, lambda: self._start(following, message.start))
            case "settle", rt.Phase.EXCHANGING | rt.Phase.AWAITING_SETTLE:
                self._try(following, lambda: following.settle(message.settle, self._now))
            case "propose", _:
                self._try(following, lambda: following.propose(message.propose, self._now))
            case "abandon", _:
                self._release(said_so=True)

    def _token_report(self, peer: str, round_id: RoundId, report: dp.TokenReport) -> None:
        if peer not in self.plan.members:
            return
        if round_id.plan_version < self.plan.version:
            self._actions.append(rt.SharePlan(peer))
        if round_id.plan_version == self.plan.version and self.phase is rt.Phase.IDLE and self._opener is None:
            self.attempt = self._trigger.reach(self.attempt, round_id.attempt, self._now)
        self._trigger.hear(peer, report, self._now)
        if self._is_between_rounds:
            self._open_if_due()

    def _received_ahead(self, peer: str, round_id: RoundId, kind: str, message: dp.RoundMessage) -> None:
        """Of a round after the next: most likely the next one is about to be committed here, too."""
        if peer not in self.plan.members:
            return
        one_ahead = round_id.number == self.head.round + 2
        if one_ahead and kind == "report" and message.report.expected:
            self._trigger.expect(peer, round_id, message.report, self._now)
            return
        ours = round_id.plan_version == self.plan.version
        if kind == "open" and ours:
            self._pending_opens.keep_ahead(rt.Received(peer, message), self._now, self._open_seconds(message))
        self._heard_from_ahead(peer, round_id.number)

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
            self._actions.append(rt.SharePlan(peer))
        refusal = self._refusal(peer, round_id)
        if refusal:
            self._decline(peer, round_id, refusal)
            return
        if message.open.head_hash != self.head.hash:
            self._decline(peer, round_id, "this member's head is another manifest")
            self._behind(f"{peer} builds round {round_id.number} on another manifest than ours")
            return
        self.attempt = round_id.attempt
        self._trigger.begin_attempt(self._now)
        seconds = self._open_seconds(message)
        self._paces.ready.suggest(seconds)
        patience = self._coordinator_seconds
        until = self._now + 2 * seconds + patience
        head, plan, policy, promises = self.head, self.plan, self.policy, self._promises
        self._following = Follower(
            self.me, peer, round_id, plan, head, policy, self._paces, self._signer, promises, patience, until
        )
        self._offer_snapshot(self._following)
        self._carry_out(self._following)

    def _offer_snapshot(self, following: Follower) -> None:
        """What others saw in an earlier attempt stays this head's snapshot, unless the round is of other layers now.

        Where we hold a result that it may be part of, one attempt is given the chance to commit that.
        """
        snapshot = self._snapshot_ledger.of(following.fragment.layers)
        if snapshot is not None:
            following.promise(snapshot, leaving=self._leaving)
        elif following.is_witness or (self._promises.held and self._snapshot_ledger.hope()):
            nothing = rt.Frozen(following.round_id, 0, 0)
            following.promise(nothing, leaving=self._leaving, brings=False)
        else:
            self._snapshot_ledger.make_room()
            following.freeze()

    def _refusal(self, peer: str, round_id: RoundId) -> str:
        """Why we do not follow that attempt; empty when we do."""
        if round_id.plan_version < self.plan.version:
            return "this member follows a newer plan"
        if peer != round_id.opener(self.openers) or self.lagging or self.void:
            return "this is not an attempt that this member follows"
        late = round_id.attempt < self.attempt or self._promises.forbids(round_id.ballot)
        if late or round_id.attempt > min(MAX_ATTEMPT, self.attempt + MAX_ATTEMPT_JUMP):
            return f"we stand at {self.round_id}"
        if self._trigger.must_wait(peer, self._now):
            return "its last attempt failed: others have their turn first"
        return ""

    def _wait_with(self, peer: str, message: dp.RoundMessage) -> None:
        self._pending_opens.keep(rt.Received(peer, message), self._now, self._open_seconds(message))

    def _open_seconds(self, message: dp.RoundMessage) -> float:
        """That the opener waits for us, at most."""
        return min(message.open.deadline_ms / 1000, self._paces.ready.ceiling_seconds)

    def _heard_from_ahead(self, peer: str, number: int) -> None:
        one_ahead = number == self.head.round + 2
        if one_ahead and self.phase in (rt.Phase.EXCHANGING, rt.Phase.AWAITING_SETTLE, rt.Phase.STAGING):
            return  # others were quicker than we are: our own result is on its way
        if one_ahead and (self._promises.held or self.phase is rt.Phase.AWAITING_COMMIT):
            self._send_report(peer)  # most likely what we wait for was committed: the answer is that manifest
        else:
            self._behind(f"{peer} is at round {number}, we are at {self.head.round}")

    def _tell_head(self, peer: str, kind: str) -> None:
        """Somebody is behind us: tell what was committed last, once a report interval."""
        interval = self.policy.report_interval.total_seconds()
        if kind not in ("report", "open", "ready", "parts", "digest") or peer not in self.plan.members:
            return
        if self._now - self._head_sent_at.get(peer, float("-inf")) < interval / 2 or not self.head.committed.signatures:
            return
        self._head_sent_at[peer] = self._now
        commit = dp.Commit(round=self.head.manifest.round, manifest=self.head.committed)
        self._send(peer, dp.RoundMessage(commit=commit))

    def _committed(self, peer: str, message: dp.Commit) -> None:
        number = message.round.number
        if number <= self.head.round or peer not in self.plan.members:
            return
        following = self._following
        if number == self.head.round + 1:
            if message.manifest.payload in self._promises.held or self._witnesses(message.manifest.payload):
                self._install(message.manifest)
                return
            staging = self.phase in (rt.Phase.EXCHANGING, rt.Phase.AWAITING_SETTLE, rt.Phase.STAGING)
            if staging and following is not None and message.round == following.round_id.to_proto():
                following.commit = message.manifest  # most likely it is what we are about to compute
                return
        self._behind(f"round {number} was committed without us")

    def _witnesses(self, payload: bytes) -> bool:
        """Whether this can be the next round's result, and changes nothing that we hold."""
        try:
            check_payload(self.policy, self.plan, self.head, payload)
            return is_witness(self.plan, self.me, payload)
        except PeerMisbehaved:
            return False

    def _install(self, committed: manifest_pb2.CommittedManifest) -> bool:
        """Commit what we hold; False when the votes do not prove it."""
        try:
            head = self._signer.check_commit(committed, self.plan.electorate(self.head))
        except AtollError:
            return False
        if not self.plan.accepts(head) or self.void:
            return False
        opened_here = self._following is not None and self._following.opener == self.me
        counted = self.counted(head.manifest)
        self._actions.append(rt.Install(head, opened_here, counted))
        if counted is rt.Counted.SNAPSHOT and self.me in head.present:
            self._promises.took_part()
        self._trigger.serve_leaving()
        self._supersede(f"round {head.round} was committed in another attempt")
        self._reset(head)
        self._adopt_plan()
        self._try_waiting()
        return True

    # --- following ---------------------------------------------------------------------------------

    def _froze(self, event: rt.Frozen) -> None:
        following = self._followed_in(event.round_id, rt.Phase.FREEZING)
        if following is not None:
            self._snapshot_ledger.keep(event, following.fragment.layers)
            self._tokens_since_snapshot = 0
            following.promise(event, leaving=self._leaving)
            self._carry_out(following)

    def _start(self, following: Follower, message: dp.Start) -> None:
        following.start(message, self._now)
        self._trigger.begin_exchange(self._now)
        if following.brings:
            weighs = any(item.peer_id == self.me and item.weight for item in message.contributions)
            self._snapshot_ledger.begin(following.round_id, weighs=weighs)

    def _on_exchange_done(self, event: rt.ExchangeDone) -> None:
        following = self._followed_in(event.round_id, rt.Phase.EXCHANGING)
        if following is not None:
            self._try(following, lambda: following.exchange_done(event, self._now))

    def _staged(self, round_id: RoundId, layers: tuple[manifest_pb2.LayerState, ...]) -> None:
        following = self._followed_in(round_id, rt.Phase.STAGING)
        if following is not None:
            self._try(following, lambda: self._hold_own(following, layers))

    def _hold_own(self, following: Follower, layers: tuple[manifest_pb2.LayerState, ...]) -> None:
        payload = following.staged(layers)
        check_payload(self.policy, self.plan, self.head, payload)  # it may be of a state that is behind our head
        self._promises.keep(payload)
        if following.commit is None or following.commit.payload != payload or not self._install(following.commit):
            following.attest(payload)
            if following.brings and not self._leaving:
                self._report_ahead()

    def _try(self, following: Follower, step: Callable[[], None]) -> None:
        """Go on with the attempt, or give up when its opener misbehaved."""
        reason = ""
        try:
            step()
        except PeerMisbehaved as error:
            reason = str(error)
        self._carry_out(following)
        if reason:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """This node cannot go on with the attempt: tell the opener, keep the progress."""
        following = self._following
        if following is None:
            return
        self._release()
        if following.opener == self.me and self._opener is not None:
            self._opener.decline(self.me, reason, self._now)
            self._drain_opener()
        elif following.opener != self.me:
            self._decline(following.opener, following.round_id, reason)

    def _on_pledge_failed(self, message: dp.RoundMessage) -> None:
        """What we trained counts all the same; the others decide without our vote."""
        following, kind = self._following, message.WhichOneof("body")
        if following is None or RoundId.from_proto(getattr(message, str(kind)).round) != following.round_id:
            return
        if kind == "ready":
            following.abstain()
            self._carry_out(following)
        else:
            self._decline(following.opener, following.round_id, "it cannot write down what it votes for")

    def _on_send_failed(self, message: dp.RoundMessage, reason: str) -> None:
        """An attempt cannot go on without its message: end it, with the reason in the round log."""
        kind = str(message.WhichOneof("body"))
        if kind in ("plan", "report", "commit"):
            return  # of no attempt that is under way
        round_id = RoundId.from_proto(getattr(message, kind).round)
        if self._opener is not None and self._opener.round_id == round_id and kind in _OPENER_KINDS:
            self._opener.give_way(reason, self._now)
            self._drain_opener()
        elif self._is_following(round_id):
            self._give_up(reason)

    def _release(self, *, said_so: bool = False) -> None:
        """Forget the current attempt; a later one has another opener. `said_so`: this one abandoned it in words."""
        following, self._following = self._following, None
        if following is None:
            return
        if not self._snapshot_ledger.exposed:
            self._snapshot_ledger.drop()
        self._actions.append(rt.Release(following.round_id, thaw=not self._snapshot_ledger.exposed))
        self._trigger.failed(following.opener, self._now, said_so=said_so)
        if following.round_id.number == self.head.round + 1 and following.plan.version == self.plan.version:
            self.attempt = self._trigger.after(self.attempt, following.round_id.attempt)
        self._adopt_plan()
        self._try_waiting()

    # --- where we stand ------------------------------------------------------------------------------

    def _reset(self, head: Head) -> None:
        """Begin at `head`: nothing frozen, nothing voted but what is on disk."""
        self.head = head
        if head.round > self._known.round or not self.plan.accepts(self._known):
            self._known = head
        self._following = None
        self._opener = None
        self._tokens = self._tokens_since_snapshot = 0
        self._snapshot_ledger = SnapshotLedger()
        self._head_sent_at = {}
        self._trigger.move(head, self.plan, self._now)
        self._promises.recall(head, self.plan)
        self.attempt = self._promises.next_attempt(self.plan)

    def _adopt_plan(self) -> None:
        if self._next_plan is None or self._following is not None or self._opener is not None:
            return
        before, self.plan, self._next_plan = self.plan, self._next_plan, None
        fragments, self.policy = self.policy.fragments, self._policy_of(self.plan)
        if self.policy.fragments != fragments:
            self._paces_by_fragment = StageDeadlines.of(self.policy)
        if self.plan.base != before.base:  # what was voted for on the old history does not count
            self._promises.recall(self.head, self.plan)
        self._trigger.begin(self.head, self.plan, self._now, self.policy)
        self.attempt = self._promises.next_attempt(self.plan)
        self._check_history()
        self._try_waiting()

    def _check_history(self) -> None:
        if not self.plan.accepts(self.head):
            self._behind(f"plan {self.plan.version} goes on from round {self.plan.base.round}, on another history")

    def _try_waiting(self) -> None:
        """An Open that came too early may be followed now."""
        received = self._pending_opens.take(self.plan.version, self.head.round + 1, self._now)
        if received is not None:
            self._inbox.append(received)

    # --- small words -------------------------------------------------------------------------------

    def _followed_in(self, round_id: RoundId, phase: rt.Phase) -> Follower | None:
        """The attempt that we follow, if it is that one and stands in that phase."""
        return self._following if self._is_following(round_id) and self.phase is phase else None

    def _is_following(self, round_id: RoundId) -> bool:
        return self._following is not None and self._following.round_id == round_id

    def _behind(self, reason: str) -> None:
        self._actions.append(rt.CatchUp(reason))

    def _decline(self, peer: str, round_id: RoundId, reason: str) -> None:
        decline = dp.Decline(
            round=round_id.to_proto(), reason=reason[:500], plan_version=self.plan.version, attempt=self.attempt
        )
        self._send(peer, dp.RoundMessage(decline=decline))

    def _send(self, peer: str, message: dp.RoundMessage) -> None:
        if peer == self.me:
            self._inbox.append(rt.Received(peer, message))
        else:
            self._actions.append(rt.Send(peer, message))
