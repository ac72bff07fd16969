"""Which attempt a member follows, which snapshot it contributes, and when it gives up. Pure."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.errors import PeerMisbehaved
from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.decide import check_payload
from atoll.node.rounds.follower import Follower
from atoll.node.rounds.pending_opens import PendingOpens
from atoll.node.rounds.round_trigger import MAX_ATTEMPT, MAX_ATTEMPT_JUMP
from atoll.node.rounds.standing import Standing
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

_LOST_SECONDS = 1.0  # an opener whose connection broke has this long to send a message


class Attendance:
    """At most one attempt at a time, in `following`.

    It has more than 20 methods: each message and each event of an attempt has its own short one.
    """

    def __init__(
        self,
        standing: Standing,
        signer: rt.VoteSigner,
        *,
        install: Callable[[manifest_pb2.CommittedManifest], bool],
        report_ahead: Callable[[], None],
        released: Callable[[], None],
    ) -> None:
        """`install` commits a held result if its votes suffice; `released` is called if an attempt ends without one."""
        self.following: Follower | None = None
        self._at = standing
        self._signer = signer
        self._install = install
        self._report_ahead = report_ahead
        self._released = released
        self._pending_opens = PendingOpens()

    @property
    def phase(self) -> rt.Phase:
        """A node's part in a round."""
        return self.following.phase if self.following is not None else rt.Phase.IDLE

    def is_freezing(self, round_id: RoundId) -> bool:
        """Whether the attempt `round_id` still needs a snapshot."""
        return self.phase is rt.Phase.FREEZING and self.follows(round_id)

    def follows(self, round_id: RoundId) -> bool:
        """Whether `round_id` is the attempt that this node follows."""
        return self.following is not None and self.following.round_id == round_id

    def tick(self) -> None:
        """Give up the attempt if its deadline has passed."""
        following = self.following
        if following is None or self._at.now < following.deadline:
            return
        if following.commit is not None:
            self._at.behind(f"round {following.round_id.number} was committed before our own result was ready")
        self.give_up(f"no progress in phase {following.phase.name.lower()}")

    def lost(self, peer: str) -> None:
        """Shorten the deadline of the attempt if the opener's connection broke, because the opener is probably dead."""
        if self.following is not None and self.following.opener == peer:
            self.following.deadline = min(self.following.deadline, self._at.now + _LOST_SECONDS)

    def end(self) -> None:
        """Leave the attempt because the head moves. Another attempt may still commit this attempt's result."""
        self.following = None

    # --- messages of the opener --------------------------------------------------------------------

    def opened(self, peer: str, round_id: RoundId, message: dp.RoundMessage) -> None:
        """An Open of the next round: follow it, keep it for later, or decline."""
        following = self.following
        if following is not None:
            if round_id.ballot <= following.round_id.ballot:
                return
            if peer != following.opener:  # finish our current attempt first
                self._wait_with(peer, message)
                return
            self._release()
        if round_id.plan_version > self._at.plan.version:
            self._wait_with(peer, message)
            return
        if round_id.plan_version < self._at.plan.version:
            self._at.actions.append(rt.SharePlan(peer))
        refusal = self._refusal(peer, round_id)
        if refusal:
            self._at.decline(peer, round_id, refusal)
            return
        if message.open.head_hash != self._at.head.hash:
            self._at.decline(peer, round_id, "this member's head is another manifest")
            self._at.behind(f"{peer} builds round {round_id.number} on another manifest than ours")
            return
        self._at.attempt = round_id.attempt
        self._at.trigger.begin_attempt(self._at.now)
        seconds = self._open_seconds(message)
        self._at.paces.ready.suggest(seconds)
        patience = self._at.coordinator_seconds
        until = self._at.now + 2 * seconds + patience
        at, signer = self._at, self._signer
        self.following = Follower(
            at.me,
            peer,
            round_id,
            at.plan,
            at.head,
            at.policy,
            at.paces,
            signer,
            at.promises,
            at.earlier,
            patience,
            until,
        )
        self._offer_snapshot(self.following)
        self._at.carry_out(self.following)

    def _offer_snapshot(self, following: Follower) -> None:
        """Send Ready with the snapshot that this head already has, or have a new snapshot taken.

        A snapshot that others saw in an earlier attempt is used again, unless the round now averages other layers. If a
        held result may contain such an unusable snapshot, this node contributes nothing to one attempt: that attempt
        can commit the held result.
        """
        snapshot = self._at.ledger.of(following.fragment.layers)
        if snapshot is not None:
            following.promise(snapshot, leaving=self._at.leaving)
        elif following.is_witness or (self._at.promises.held and self._at.ledger.hope()):
            nothing = rt.Frozen(following.round_id, 0, 0)
            following.promise(nothing, leaving=self._at.leaving, brings=False)
        else:
            self._at.ledger.make_room()
            following.freeze()

    def _refusal(self, peer: str, round_id: RoundId) -> str:
        """Why this node does not follow the attempt; empty if it does."""
        if round_id.plan_version < self._at.plan.version:
            return "this member follows a newer plan"
        if peer != round_id.opener(self._at.openers) or self._at.lagging or self._at.void:
            return "this is not an attempt that this member follows"
        late = round_id.attempt < self._at.attempt or self._at.promises.forbids(round_id.ballot)
        if late or round_id.attempt > min(MAX_ATTEMPT, self._at.attempt + MAX_ATTEMPT_JUMP):
            return f"we stand at {self._at.round_id}"
        if self._at.trigger.must_wait(peer, self._at.now):
            return "its last attempt failed: others have their turn first"
        return ""

    def hear(self, peer: str, round_id: RoundId, kind: str, message: dp.RoundMessage) -> None:
        """Process a message of the opener that this node follows. Ignore messages of other openers."""
        following = self.following
        if following is None or following.round_id != round_id or following.opener != peer:
            return
        match kind, self.phase:
            case "start", rt.Phase.READY:
                self._try(following, lambda: self._start(following, message.start))
            case "settle", rt.Phase.EXCHANGING | rt.Phase.AWAITING_SETTLE:
                self._try(following, lambda: following.settle(message.settle, self._at.now))
            case "propose", _:
                self._try(following, lambda: following.propose(message.propose, self._at.now))
            case "abandon", _:
                self._release(said_so=True)

    def _start(self, following: Follower, message: dp.Start) -> None:
        following.start(message, self._at.now)
        self._at.trigger.begin_exchange(self._at.now)
        if following.brings:
            weighs = any(item.peer_id == self._at.me and item.weight for item in message.contributions)
            self._at.ledger.begin(following.round_id, weighs=weighs)

    # --- our own steps -----------------------------------------------------------------------------

    def froze(self, event: rt.Frozen) -> bool:
        """Take the trainer's snapshot into the attempt. Returns whether the attempt still needs it."""
        following = self._followed_in(event.round_id, rt.Phase.FREEZING)
        if following is not None:
            self._at.ledger.keep(event, following.fragment.layers)
            following.promise(event, leaving=self._at.leaving)
            self._at.carry_out(following)
        return following is not None

    def exchange_done(self, event: rt.ExchangeDone) -> None:
        """Report that this node's part of the exchange is over."""
        following = self._followed_in(event.round_id, rt.Phase.EXCHANGING)
        if following is not None:
            self._try(following, lambda: following.exchange_done(event, self._at.now))

    def staged(self, round_id: RoundId, layers: tuple[manifest_pb2.LayerState, ...]) -> None:
        """Keep and attest to the result that this node has computed."""
        following = self._followed_in(round_id, rt.Phase.STAGING)
        if following is not None:
            self._try(following, lambda: self._hold_own(following, layers))

    def _hold_own(self, following: Follower, layers: tuple[manifest_pb2.LayerState, ...]) -> None:
        payload = following.staged(layers)
        check_payload(
            self._at.policy, self._at.plan, self._at.head, payload
        )  # the result may come from a state older than our head
        self._at.promises.keep(payload)
        if following.commit is None or following.commit.payload != payload or not self._install(following.commit):
            following.attest(payload)
            if following.brings and not self._at.leaving:
                self._report_ahead()

    def _try(self, following: Follower, step: Callable[[], None]) -> None:
        """Run one step of the attempt. Give up the attempt if its opener misbehaved."""
        reason = ""
        try:
            step()
        except PeerMisbehaved as error:
            reason = str(error)
        self._at.carry_out(following)
        if reason:
            self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Leave the attempt and tell its opener why. This node's training is kept."""
        following = self.following
        if following is not None:
            self._release()
            self._at.decline(following.opener, following.round_id, reason)

    def pledge_failed(self, message: dp.RoundMessage) -> None:
        """Continue without a vote: a promise or a vote could not be written to disk."""
        following, kind = self.following, message.WhichOneof("body")
        if following is None or RoundId.from_proto(getattr(message, str(kind)).round) != following.round_id:
            return
        if kind == "ready":
            following.abstain()
            self._at.carry_out(following)
        else:
            self._at.decline(following.opener, following.round_id, "it cannot write down what it votes for")

    def _release(self, *, said_so: bool = False) -> None:
        """Forget the current attempt, whose opener must then wait. `said_so`: the opener sent Abandon."""
        following, self.following = self.following, None
        if following is None:
            return
        if not self._at.ledger.exposed:
            self._at.ledger.drop()
        self._at.actions.append(rt.Release(following.round_id, thaw=not self._at.ledger.exposed))
        self._at.trigger.failed(following.opener, self._at.now, said_so=said_so)
        if following.round_id.number == self._at.head.round + 1 and following.plan.version == self._at.plan.version:
            self._at.attempt = self._at.trigger.after(self._at.attempt, following.round_id.attempt)
        self._released()
        self.try_waiting()

    # --- Opens that came too early -----------------------------------------------------------------

    def wait_ahead(self, peer: str, message: dp.RoundMessage) -> None:
        """Keep an Open of a round after the next one for later."""
        self._pending_opens.keep_ahead(rt.Received(peer, message), self._at.now, self._open_seconds(message))

    def try_waiting(self) -> None:
        """Check whether a kept Open can be followed now."""
        received = self._pending_opens.take(self._at.plan.version, self._at.head.round + 1, self._at.now)
        if received is not None:
            self._at.inbox.append(received)

    def _wait_with(self, peer: str, message: dp.RoundMessage) -> None:
        self._pending_opens.keep(rt.Received(peer, message), self._at.now, self._open_seconds(message))

    def _open_seconds(self, message: dp.RoundMessage) -> float:
        """Seconds that the opener waits for Ready, at most the ceiling of this stage."""
        return min(message.open.deadline_ms / 1000, self._at.paces.ready.ceiling_seconds)

    def _followed_in(self, round_id: RoundId, phase: rt.Phase) -> Follower | None:
        """The attempt that this node follows, if it is `round_id` and is in `phase`."""
        return self.following if self.follows(round_id) and self.phase is phase else None
