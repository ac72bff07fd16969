"""The state that the parts of the round machine share: head, plan, promises at that head, pending actions. Pure.

`move` resets everything that belongs to the head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.quorum import COORDINATOR, Promised, VoteRecord
from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.earlier_attempts import EarlierAttempts
from atoll.node.rounds.follower import Follower
from atoll.node.rounds.opener import COORDINATOR_SECONDS, Opener
from atoll.node.rounds.promises import Promises
from atoll.node.rounds.round_trigger import RoundTrigger
from atoll.node.rounds.snapshot_ledger import SnapshotLedger
from atoll.node.rounds.stage_deadlines import StageDeadlines
from atoll.node.rounds.suspicions import Suspicions
from atoll.v1 import dataplane_pb2 as dp


class Standing:
    """The machine empties `actions` and `inbox` (messages to ourselves) in order.

    It has more than 15 attributes: all that the machine's parts share is here, so that none keeps a copy.
    """

    def __init__(
        self,
        me: str,
        policy_of: rt.PolicyOf,
        head: Head,
        plan: Plan,
        now: float,
        record: VoteRecord | None,
        known: Head | None,
        draw_mark: Callable[[], bytes],
        told: Promised | None,
    ) -> None:
        self.me = me
        self.policy = policy_of(plan)
        self.head = head
        self.plan = plan
        self.attempt = 0  # the next one
        self.known = known or head  # the newest committed head that this node ever saw
        self.now = now
        self.leaving = False
        self.promises = Promises(me, record, head, plan, draw_mark, told)
        self.marks: dict[str, bytes] = {}  # marks of others at this head, from our own attempts
        self.trigger = RoundTrigger(me, self.policy, head, plan, now)
        self.ledger = SnapshotLedger()
        self.suspicions = Suspicions()
        self.earlier = EarlierAttempts(None)
        self.paces_by_fragment = StageDeadlines.of(self.policy)
        self.actions: list[rt.Action] = []
        self.inbox: deque[rt.Received] = deque()
        self._policy_of = policy_of
        self.move(head)

    @property
    def finished(self) -> bool:
        """Whether the run has all its tokens. Then no more rounds open."""
        return self.head.committed_tokens >= self.policy.stop_tokens

    @property
    def round_id(self) -> RoundId:
        """The attempt that would open next."""
        number = self.head.round + 1
        fragment = self.policy.fragment_of(number).index
        return RoundId(self.policy.run_id, self.plan.version, fragment, number, self.attempt)

    @property
    def openers(self) -> tuple[str, ...]:
        """The members that may open the next round, in order."""
        return self.plan.openers(self.head)

    @property
    def other_openers(self) -> list[str]:
        return [peer for peer in self.openers if peer != self.me]

    @property
    def lagging(self) -> bool:
        """Whether a newer round than our head is known to be committed.

        Then we wait for its state, or for a recovery.
        """
        return self.head.round < self.known.round and self.plan.accepts(self.known)

    @property
    def void(self) -> bool:
        """Whether a recovery made our head void.

        Then this node takes part in no round until it fetched another head.
        """
        return not self.plan.accepts(self.head)

    @property
    def paces(self) -> StageDeadlines:
        """Deadlines for the next round's fragment."""
        return self.paces_by_fragment[self.policy.fragment_of(self.head.round + 1).index]

    @property
    def coordinator_seconds(self) -> float:
        """Seconds that an opener may wait for the coordinator, which is longer if the coordinator has a seat."""
        return COORDINATOR_SECONDS if COORDINATOR in self.plan.seats(self.head) else 1.0

    def move(self, head: Head) -> None:
        """Start again at `head`: no snapshot, and only the votes that are on disk."""
        self.head = head
        if head.round > self.known.round or not self.plan.accepts(self.known):
            self.known = head
        self.ledger = SnapshotLedger()
        self.marks = {}
        self.trigger.move(head, self.plan, self.now)
        self.promises.recall(head, self.plan)
        self.earlier = EarlierAttempts(self.promises.answered)
        self.attempt = self.promises.next_attempt(self.plan)

    def adopt(self, plan: Plan) -> None:
        """Continue under a newer plan."""
        before, self.plan = self.plan, plan
        fragments, self.policy = self.policy.fragments, self._policy_of(plan)
        if self.policy.fragments != fragments:
            self.paces_by_fragment = StageDeadlines.of(self.policy)
        if plan.base != before.base:  # votes on the old history do not count
            self.promises.recall(self.head, plan)
            self.marks = {}  # members that abstained at this head have new marks now
        self.trigger.begin(self.head, plan, self.now, self.policy)
        self.attempt = self.promises.next_attempt(plan)
        self.check_history()

    def check_history(self) -> None:
        """Ask for another head if a recovery made ours void."""
        if not self.plan.accepts(self.head):
            self.behind(f"plan {self.plan.version} goes on from round {self.plan.base.round}, on another history")

    def behind(self, reason: str) -> None:
        """Order a catch-up, because others are ahead."""
        self.actions.append(rt.CatchUp(reason))

    def decline(self, peer: str, round_id: RoundId, reason: str) -> None:
        """Tell the opener that we cannot take part in its attempt, and which attempt we could follow."""
        decline = dp.Decline(
            round=round_id.to_proto(), reason=reason[:500], plan_version=self.plan.version, attempt=self.attempt
        )
        self.send(peer, dp.RoundMessage(decline=decline))

    def send(self, peer: str, message: dp.RoundMessage) -> None:
        """Send a message to a peer or to this node itself."""
        if peer == self.me:
            self.inbox.append(rt.Received(peer, message))
        else:
            self.actions.append(rt.Send(peer, message))

    def carry_out(self, attempt: Opener | Follower) -> None:
        """Send the messages and carry out the actions that an attempt has collected."""
        out, attempt.out = attempt.out, []
        for item in out:
            if isinstance(item, tuple):
                self.send(*item)
            else:
                self.actions.append(item)
