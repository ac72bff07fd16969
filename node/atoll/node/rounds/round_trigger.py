"""When a round is due, and which member opens it: who reported lately, and whose attempts failed. Pure bookkeeping.

Members report their tokens to the seats; only the tokens of holders count. With an attestation they also report the
tokens that remain after the commit. A round is due in three cases: the members that reported can commit it and will
have enough tokens when they are asked; or no round was committed for long; or a member waits to leave. If exchanges
take long, it is due later (exchange_share.py). A due round waits a little for late members (latecomers.py). The
attempt's number names the only peer that may open it. A live peer that does not open is passed over after a while. An
opener whose attempt failed goes after the others (failed_openers.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.quorum import COORDINATOR
from atoll.core.round_id import RoundId
from atoll.node.rounds.exchange_share import ExchangeShare
from atoll.node.rounds.failed_openers import FailedOpeners
from atoll.node.rounds.last_report import LEAST_INTERVAL, LastReport
from atoll.node.rounds.latecomers import Latecomers
from atoll.node.rounds.types import RoundPolicy
from atoll.v1 import dataplane_pb2 as dp

MAX_ATTEMPT = 1_000_000
MAX_ATTEMPT_JUMP = 1000  # an opener cannot push the attempt counter further than this at once
_LATELY = 3.0  # report intervals after which a silent member is not waited for
_REPORTS = 10  # at least, in a round as long as the last one, so that no report is long overdue
STRANGERS_GRACE = 2.0  # seconds in which reports and answers of members on probation are waited for, at least
_TOLD = 0.8  # least share of a round's tokens that must be reported when it opens; the rest is forecast
_NEVER = float("-inf")


def _at_once(peer: str) -> float:
    return 0.0


class RoundTrigger:
    """What one member knows of the others at one head under one plan; `begin` resets it.

    It has many attributes and methods: whether a round is due depends on all that a member heard and did at this head.
    """

    def __init__(self, me: str, policy: RoundPolicy, head: Head, plan: Plan, now: float) -> None:
        self._me = me
        self._policy = policy
        self._interval = policy.report_interval.total_seconds()
        self._reached = _NEVER
        self._left: set[str] = set()  # leaving members for which a round was already opened
        self._said_newer: set[str] = set()  # members that reported a newer plan
        self._plan = plan
        self._last_commit = _NEVER
        self._exchanges = ExchangeShare()
        self._heard: dict[str, LastReport] = {}
        self._latecomers = Latecomers(policy.round_max.total_seconds(), now)
        self._attempt_began = math.inf  # start of the last attempt since the head
        # peer → its report for the next head, and when it came
        self._expected: dict[str, tuple[RoundId, dp.TokenReport, float]] = {}
        self.move(head, plan, now)

    def move(self, head: Head, plan: Plan, now: float) -> None:
        """Start again at the head of a committed round."""
        self._lasted = now - self._last_commit
        self._last_commit = now
        self._exchanges.commit(self._policy.exchange_share * len(self._policy.fragments), now)
        self._attempt_began = math.inf
        self._latecomers.move(head, now)
        self.begin(head, plan, now)
        expected, self._expected = self._expected, {}
        for peer, (round_id, report, when) in expected.items():
            if (round_id.number, round_id.plan_version) == (head.round + 1, plan.version):
                self.hear(peer, report, when)

    def begin(self, head: Head, plan: Plan, now: float, policy: RoundPolicy | None = None) -> None:
        """Start again at a new head or under a new plan and policy: no member reported, none failed."""
        self._policy = policy or self._policy
        if plan.version != self._plan.version:
            self._said_newer.clear()
        self._head, self._plan = head, plan
        self._holders = plan.holders(self._policy.fragment_of(head.round + 1).layers)
        self._trainers = self._holders & plan.stages
        self._heard = {}
        self._reported = _NEVER
        self._due_since: float | None = None
        self._enough_since: float | None = None
        self._began = now
        self._failed = FailedOpeners()
        self._declined_to = 0  # the attempt that other seats could still follow
        self._await_latecomers(now)

    def serve_leaving(self) -> None:
        """Record that the members that wait to leave have had their round."""
        self._left |= {peer for peer, said in self._heard.items() if said.leaving}

    def begin_attempt(self, now: float) -> None:
        """We follow an attempt. Members that reach this head from now on are too late for it."""
        self._attempt_began = now
        self._latecomers.end(self._head, now)

    def begin_exchange(self, now: float) -> None:
        """Record that the exchange of an attempt at the next round begins."""
        self._exchanges.begin(now)

    def forget_exchange(self) -> None:
        """Forget the current exchange: the next head may not be its result."""
        self._exchanges.forget()

    @property
    def enough_since(self) -> float | None:
        """Since when the tokens suffice for a round, even if it is not due for another reason."""
        return self._enough_since

    # --- present members ------------------------------------------------------------------------------

    def hear(self, peer: str, report: dp.TokenReport, now: float) -> None:
        """Record a report of a member of the plan. Its tokens count up to its cap."""
        if now >= self._attempt_began and not report.leaving:
            self._latecomers.see(peer, self._head.round, self._head, now)
        tokens = min(report.tokens, self._cap(peer))
        self._heard[peer] = self._said(peer, tokens, report.leaving, report.step_ms / 1000, now)

    def hear_behind(self, peer: str, report: dp.TokenReport, now: float) -> None:
        """Record a report for our head's round or an earlier one: the member is behind us."""
        if report.expected or report.leaving:
            return
        self._latecomers.see(peer, report.round.number - 1, self._head, now)
        if now < self._attempt_began:
            self._await_latecomers(now, peer)

    def _await_latecomers(self, now: float, peer: str = "") -> None:
        self._latecomers.begin(self._head, self._plan, self._exchanges.usual_seconds, now, peer)

    def expect(self, peer: str, round_id: RoundId, report: dp.TokenReport, now: float) -> None:
        """Keep a member's report for the next head."""
        self._expected[peer] = round_id, report, now

    def hear_self(self, tokens: int, leaving: bool, step_seconds: float, now: float) -> bool:
        """Record this node's own figures. Returns whether it is time to report them."""
        self._heard[self._me] = self._said(self._me, tokens, leaving, step_seconds, now)
        lasted = max(self._lasted, now - self._last_commit)
        if now - self._reported < min(self._interval, max(LEAST_INTERVAL, lasted / _REPORTS)):
            return False
        self._reported = now
        return True

    def _said(self, peer: str, tokens: int, leaving: bool, step_seconds: float, now: float) -> LastReport:
        before, full = self._heard.get(peer), self._is_full(peer, tokens)
        return LastReport.after(before, tokens, now, leaving=leaving, step_seconds=step_seconds, full=full)

    def lose(self, peer: str) -> None:
        """Forget a member whose connection broke."""
        self._heard.pop(peer, None)
        self._expected.pop(peer, None)
        self._latecomers.lose(peer)

    def heard_recently(self, now: float) -> frozenset[str]:
        """Members of the plan that reported lately, with this node."""
        heard = {peer for peer, said in self._heard.items() if now - said.when <= _LATELY * self._interval}
        return frozenset((heard | {self._me}) & set(self._plan.members))

    def slowest_step(self, now: float) -> float:
        """Seconds of the slowest inner step among the members that reported lately."""
        peers = self._plan.without_probation(self.heard_recently(now) & self._heard.keys())
        return max((self._heard[peer].step_seconds for peer in peers), default=0.0)

    # --- whose turn ----------------------------------------------------------------------------------

    def attempt_to_open(self, round_id: RoundId, now: float, lead: Callable[[str], float] = _at_once) -> int | None:
        """The attempt that this node opens now, or None. `round_id` is the next attempt that may be opened.

        `lead`: seconds from our Open to a member's answer. A member continues to train until the end of its step, so it
        will have more tokens than its last report says.
        """
        if self._failed.all_must_wait(now) or self.must_wait(self._me, now):
            return None
        if not self._is_due(now, lead):
            self._due_since = None
            return None
        self._due_since = now if self._due_since is None else self._due_since
        order = self._plan.openers(self._head)
        if self._me not in order:
            return None
        turn = (order.index(self._me) - round_id.attempt) % len(order)
        before_us = {order[(round_id.attempt + ahead) % len(order)] for ahead in range(turn)} & self.heard_recently(now)
        if now - self._due_since < len(before_us) * self._policy.open_timeout.total_seconds():
            return None
        return round_id.attempt + turn

    def _is_due(self, now: float, lead: Callable[[str], float]) -> bool:
        heard_recently = self.heard_recently(now)
        if not self._plan.electorate(self._head).decides({*heard_recently, COORDINATOR}):
            return False  # no quorum could commit
        said = {peer: self._heard[peer] for peer in heard_recently & self._heard.keys()}
        # members on probation may be one attacker, and must not cause a round
        proved = self._plan.without_probation(said.keys())
        total = sum(said[peer].tokens for peer in proved & self._holders)
        leaving = any(said[peer].leaving for peer in proved - self._left)
        began = self._head.round > self._plan.base.round
        patience = _LATELY * self._interval if began else self._policy.ready_timeout.total_seconds()
        members = frozenset(self._plan.members)
        due_here = members & self._head.present if began else members
        if now - self._began >= STRANGERS_GRACE:
            due_here = self._plan.without_probation(due_here)
        everyone = due_here <= heard_recently or now - self._began >= patience
        overdue = now - self._last_commit >= self._policy.round_max.total_seconds()
        # otherwise a member that knows of longer leads would open out of turn
        most = self._policy.open_timeout.total_seconds() / 2
        coming = sum(
            max(0.0, min(said[peer].coming(now, min(lead(peer), most)), self._cap(peer) - said[peer].tokens))
            for peer in proved & self._holders - {self._me}
        )
        trainers = self._plan.without_probation(heard_recently & self._trainers)
        enough = everyone and self._suffices(total, coming, len(trainers))
        if enough and self._enough_since is None:
            self._enough_since = now
        all_here = not self._latecomers.are_awaited(heard_recently, now)
        last = self._head.committed_tokens + total >= self._policy.stop_tokens
        rested = last or self._exchanges.is_over(now) or any(said[peer].full for peer in proved)
        is_time = (enough and all_here) or overdue
        return total > 0 and ((is_time and rested) or leaving)

    def _suffices(self, total: int, coming: float, members: int) -> bool:
        """Whether there will be enough tokens when members are asked.

        The last round needs all its tokens beforehand.
        """
        committed = self._head.committed_tokens
        due = self._policy.due_tokens(committed, members)
        is_last = committed + due >= self._policy.stop_tokens
        return total >= due or (not is_last and total >= _TOLD * due and total + coming >= due)

    def _cap(self, peer: str) -> int:
        """The most tokens that a round counts of this member."""
        assignment = self._plan.assignment(peer)
        return assignment.max_round_tokens if assignment else 0

    def _is_full(self, peer: str, tokens: int) -> bool:
        """Whether more tokens would not be counted. `tokens` are since the head; the cap is for a turn of fragments."""
        return tokens * len(self._policy.fragments) >= self._cap(peer) > 0

    def must_wait(self, opener: str, now: float) -> bool:
        """Whether other openers go before this one, whose attempts failed."""
        return self._failed.must_wait(opener, now)

    def failed(self, opener: str, now: float, *, said_so: bool) -> None:
        """Record that an attempt that we followed failed. `said_so`: its opener sent Abandon."""
        self._failed.fail(opener, now, said_so=said_so)
        self._due_since = self._enough_since = None
        self.forget_exchange()

    # --- attempts that others can follow --------------------------------------------------------------

    def reach(self, attempt: int, wanted: int, now: float) -> int:
        """The next attempt when a member cannot follow those before `wanted`. It moves by at most one lap at a time."""
        if wanted <= attempt or now - self._reached < self._interval / 2:
            return attempt
        self._reached = now
        return min(wanted, attempt + len(self._plan.members), MAX_ATTEMPT)

    def declined(self, attempt: int, wanted: int) -> None:
        """Record that a seat declined our attempt, and that `wanted` is the first that it can follow."""
        self._declined_to = max(self._declined_to, min(wanted, attempt + MAX_ATTEMPT_JUMP))

    def awaits_newer_plan(self, peer: str) -> bool:
        """Whether to wait for the newer plan that `peer` reports.

        True only once for each peer and plan, as it may lie.
        """
        known = peer in self._said_newer
        self._said_newer.add(peer)
        return not known

    def after(self, attempt: int, failed: int) -> int:
        """The number of the next attempt after `failed` failed."""
        return min(MAX_ATTEMPT, max(attempt, failed + 1, self._declined_to))
