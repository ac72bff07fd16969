"""Time between two plans: changes are gathered, unless waiting would stop the run. Pure.

Members adopt a plan at different moments, and an attempt at a round fails if its members follow different plans. So two
plans are at least `Policy.plan_interval_seconds` apart. A plan does not wait in two cases: the remaining members of the
current plan cannot decide the next round, or none of its routes trains.
"""

from __future__ import annotations

from collections.abc import Collection

from atoll.coordinator.live import quorum_guard
from atoll.coordinator.live.attendance import Attendance
from atoll.coordinator.state.snapshot import Policy, State


def may_issue(
    state: State,
    run_id: str,
    policy: Policy,
    attendance: Attendance,
    now: float,
    gone: Collection[str] = (),
) -> bool:
    """True if the next plan may be issued: the last one is old enough, or waiting would stop the run.

    `gone`: peer ids of stages that are counted as lost although they may return.
    """
    issued_at = state.memory[run_id].plan_issued_at
    old_enough = issued_at is None or now - issued_at >= policy.plan_interval_seconds
    return old_enough or _is_urgent(state, run_id, attendance, gone)


def _is_urgent(state: State, run_id: str, attendance: Attendance, gone: Collection[str]) -> bool:
    plan = state.memory[run_id].plan
    if plan is None:
        return True
    trains = attendance.plannable.difference(gone)
    if not any(trains.issuperset(route) for route in plan.routes):
        return True
    return not quorum_guard.can_present_plan_decide(state, run_id, attendance.present_peers)
