"""Verified directives of the coordinator to this node: plan, order, run state. Other parts wait for changes of them.

The newest plan is kept on disk, and members pass it on to each other. So a node can start and train while the
coordinator is down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError

from atoll.core import log
from atoll.core.errors import AtollError, DataDirUnusable
from atoll.core.files import write_atomic
from atoll.core.membership import DenyList, MembershipVerifier
from atoll.core.plan import Plan, verify_plan
from atoll.core.quorum import Ballot, Promised
from atoll.node.control.run_directories import record_created
from atoll.node.state.kept_rounds import KeptRounds
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb

_log = log.get("coordinator")
_LATEST_MS = 2**53  # the largest integer that is exact in JSON


class Directives:
    """The newest verified plan, order and run state; `until` waits for a change.

    It has many attributes because the coordinator's replies carry many facts, and each of them is one attribute.
    """

    def __init__(
        self,
        authority: MembershipVerifier,
        on_deny_list: Callable[[DenyList, pb.Signed], None],
        on_seeds_changed: Callable[[tuple[str, ...]], None],
        plan_path: Path,
    ) -> None:
        self.plan: Plan | None = None
        self.signed_plan: pb.Signed | None = None
        self.order = mb.ORDER_UNSPECIFIED
        self.run_state = mb.RUN_STATE_UNSPECIFIED
        self.prepare = range(0)  # layers that the next plan may assign to this node
        self.checkpoint_round = 0  # round of which the operator wants a checkpoint, or of a later one; 0: no order
        # the newest promise that an earlier process of this node sent to the coordinator
        self.promised_before: Promised | None = None
        self.notice = ""  # text for people: why the coordinator does not count this node; empty if it does
        self.eta_unix_ms: int | None = None  # when the run will reach stop_tokens, by the coordinator's clock
        self.credit: mb.Credit | None = None  # this node's contribution to the run, including earlier processes
        self._authority = authority
        self._on_deny_list = on_deny_list
        self._on_seeds_changed = on_seeds_changed
        self._changed = asyncio.Event()  # replaced at each change
        self._plan_path = plan_path
        self._kept_rounds = KeptRounds(plan_path.parent)
        self._load_saved_plan()

    def apply_heartbeat(self, response: mb.HeartbeatResponse) -> None:
        """Adopt the directives in the answer to a heartbeat; log and ignore a plan or list that does not verify."""
        if response.HasField("plan"):
            self._log_if_unverified(lambda: self._adopt_if_newer(response.plan))
        if response.HasField("deny_list"):
            signed = response.deny_list
            self._log_if_unverified(lambda: self._on_deny_list(self._authority.verify_deny_list(signed), signed))
        if response.HasField("promised"):
            told = response.promised
            self.promised_before = Promised(told.round, Ballot(told.plan_version, told.attempt), told.voted)
        if response.seeds:
            self._log_if_unverified(lambda: self._on_seeds_changed(tuple(response.seeds)))
        if response.notice and response.notice != self.notice:
            _log.warning("node_not_counted", reason=response.notice)
        self.notice = response.notice
        try:  # nodes that joined with an older release do not have it
            record_created(self._plan_path.parent, response.run_created_unix_ms)
        except DataDirUnusable as error:
            _log.warning("run_not_dated", reason=str(error))
        self._keep_rounds(response)
        self.order = response.order
        self.run_state = response.run_state
        known = response.HasField("eta_unix_ms") and 0 < response.eta_unix_ms <= _LATEST_MS
        self.eta_unix_ms = response.eta_unix_ms if known else None
        if response.HasField("credit"):
            self.credit = response.credit
        self.checkpoint_round = response.checkpoint_round
        prepare = response.prepare
        self.prepare = range(prepare.first, prepare.last + 1) if response.HasField("prepare") else range(0)
        self.wake()

    @property
    def kept_rounds(self) -> tuple[int, ...]:
        """Rounds whose checkpoints are kept because forks of this run begin with them."""
        return self._kept_rounds.rounds

    def _keep_rounds(self, response: mb.HeartbeatResponse) -> None:
        if response.order == mb.ORDER_MOVE:  # from a coordinator that already counts this node in the next run
            return
        try:
            self._kept_rounds.replace(tuple(response.kept_rounds))
        except DataDirUnusable as error:
            _log.warning("kept_rounds_not_saved", reason=str(error))

    def accept_plan(self, signed: pb.Signed) -> None:
        """Adopt a plan that a member passed on; ignore it if it does not verify or is not newer."""
        self._log_if_unverified(lambda: self._adopt_if_newer(signed))
        self.wake()

    def plan_newer_than(self, version: int) -> pb.Signed | None:
        """Return this node's plan as the operator signed it, if it is newer than `version`."""
        return self.signed_plan if self.plan is not None and self.plan.version > version else None

    def _adopt_if_newer(self, signed: pb.Signed) -> None:
        plan = verify_plan(signed, self._authority.operator_key, self._authority.run_id)
        if self.plan is None or plan.version > self.plan.version:
            self.plan, self.signed_plan = plan, signed
            _log.info("plan received", version=plan.version, members=len(plan.members), reason=plan.reason)
            write_atomic(self._plan_path, signed.SerializeToString())

    def _load_saved_plan(self) -> None:
        try:
            signed = pb.Signed.FromString(self._plan_path.read_bytes())
            self.plan = verify_plan(signed, self._authority.operator_key, self._authority.run_id)
            self.signed_plan = signed
        except FileNotFoundError:
            return
        except (OSError, DecodeError, AtollError) as error:
            _log.warning("saved plan cannot be read; the coordinator sends it again", reason=str(error))

    def _log_if_unverified(self, adopt: Callable[[], None]) -> None:
        try:
            adopt()
        except AtollError as error:
            _log.error("coordinator_message_rejected", reason=str(error))

    def wake(self) -> None:
        """Make all waiters check their conditions again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true. The caller sets the deadline, if it needs one."""
        while not condition():
            await self._changed.wait()
