"""Plans and deny-lists signed with the operator key: signed when issued, verified when loaded, and kept for sending."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from atoll.coordinator.store.records import DenyRow, PlanRow
from atoll.coordinator.store.store import Contents
from atoll.core.clock import Clock
from atoll.core.errors import DatabaseCorrupt, Rejected
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, DenyList, MembershipVerifier, issue_deny_list
from atoll.core.plan import Plan, sign_plan, verify_plan
from atoll.v1 import common_pb2 as pb


class SignedDocuments:
    """The newest signed plan of each run, and the current signed deny-list."""

    def __init__(self, operator: Identity, clock: Clock) -> None:
        self._operator = operator
        self._clock = clock
        self._plans: dict[str, pb.Signed] = {}
        self._deny_list = self._sign_deny_list(EMPTY_DENY_LIST)

    @property
    def deny_list(self) -> pb.Signed:
        """The current signed deny-list."""
        return self._deny_list

    def plan(self, run_id: str) -> pb.Signed | None:
        """The run's newest signed plan."""
        return self._plans.get(run_id)

    def plan_row(self, plan: Plan) -> PlanRow:
        """Sign a plan. It is sent only after `publish`."""
        signed = sign_plan(self._operator, plan).SerializeToString()
        return PlanRow(plan.run_id, plan.version, signed, plan.issued_unix_ms)

    def deny_row(self, deny: DenyList) -> DenyRow:
        """Sign a deny-list. It is sent only after `publish`."""
        return DenyRow(deny.number, self._sign_deny_list(deny).SerializeToString())

    def publish(self, row: PlanRow | DenyRow) -> None:
        """Make a durable row the newest of its kind."""
        signed = pb.Signed.FromString(row.sealed)
        if isinstance(row, PlanRow):
            self._plans[row.run_id] = signed
        else:
            self._deny_list = signed

    def forget(self, run_id: str) -> None:
        """Forget the plan of a deleted run, because a new run may have the same name."""
        self._plans.pop(run_id, None)

    def load(self, contents: Contents) -> tuple[tuple[Plan, ...], DenyList | None]:
        """Verify and publish the stored documents. Raises `DatabaseCorrupt` if another key signed one."""
        try:
            plans = tuple(self._load_plan(row) for row in contents.plans)
            deny = self._load_deny_list(contents.deny) if contents.deny else None
        except (Rejected, DecodeError) as error:
            raise DatabaseCorrupt(
                f"the database holds a plan or deny-list that this coordinator's key did not sign: {error}",
                "take database and keys from the same backup; nothing was changed",
            ) from error
        return plans, deny

    def _load_plan(self, row: PlanRow) -> Plan:
        plan = verify_plan(pb.Signed.FromString(row.sealed), self._operator.public_key, row.run_id)
        self.publish(row)  # rows are ordered by version, so the newest remains
        return plan

    def _load_deny_list(self, row: DenyRow) -> DenyList:
        self.publish(row)
        return MembershipVerifier(self._operator.public_key, "").verify_deny_list(self._deny_list)

    def _sign_deny_list(self, deny: DenyList) -> pb.Signed:
        return issue_deny_list(self._operator, deny.number, deny.peer_ids, self._clock.unix())
