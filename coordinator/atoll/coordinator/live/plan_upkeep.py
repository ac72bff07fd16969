"""Upkeep of a run's plan: issues the next plan when the nodes have changed. Pure.

All eligible nodes are in the plan. When that set has changed for the debounce time and the last plan is old enough
(`plan_spacing.py`), the next plan is issued. An empty plan is never issued; nodes keep the last one. If a node cannot
hold all layers, `replan_trigger` asks the planner instead.
"""

from __future__ import annotations

import math

from atoll.coordinator.live import plan_spacing, quorum_guard, replan_trigger
from atoll.coordinator.live.attendance import Attendance, attendance_of, eligible_nodes, membership_change
from atoll.coordinator.live.plan_issue import RESHARE_REASON, issue_replica_plan, reduce_rates, reported_links
from atoll.coordinator.live.planner_question import may_follow_newer_plan
from atoll.coordinator.live.probation import probation_changed, probation_text
from atoll.coordinator.live.replan_trigger import ReplanReason
from atoll.coordinator.planner.reduce_shares import MIN_RESHARE_SPEEDUP, reshare_speedup
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.run_states import transition_run
from atoll.coordinator.state.snapshot import Policy, State
from atoll.core.plan import Plan


def issue_first_plan(draft: Draft, run_id: str) -> None:
    """Issue plan 1 to all ready nodes, once genesis is stored. Does nothing if the planner is needed."""
    state = draft.state
    if replan_trigger.needs_routes(state, run_id, attendance_of(state, run_id, draft.now.monotonic)):
        return
    ready = sorted({*filter(None, [state.memory[run_id].genesis_writer]), *eligible_nodes(state, run_id)})
    if ready:
        draft.remember(run_id, question=None, no_plan_reason="")
        issued = issue_replica_plan(draft, run_id, ready, "the run starts")
        if issued and state.runs[run_id].state == "GENESIS":
            transition_run(draft, run_id, "TRAINING", f"training starts with {len(ready)} nodes")


def update_plan(draft: Draft, run_id: str, policy: Policy) -> None:
    """Issue the next plan if it is due, or ask the planner for it."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if now < memory.no_plan_before:
        return
    attendance = attendance_of(draft.state, run_id, now)
    quorum_guard.forget_old_reason(draft, run_id)
    if replan_trigger.needs_routes(draft.state, run_id, attendance):
        replan_trigger.update_routes(draft, run_id, policy, attendance)
    elif memory.plan is None:
        issue_first_plan(draft, run_id)
    else:
        _update_replicas(draft, run_id, policy, attendance, memory.plan)


def _update_replicas(draft: Draft, run_id: str, policy: Policy, attendance: Attendance, plan: Plan) -> None:
    _end_fetches(draft, run_id)
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    change = _replica_change(draft.state, policy, attendance.members, plan) if attendance.members else None
    if change is None:
        if memory.changed_since is not None:
            draft.remember(run_id, changed_since=None)
        return
    why, reason, debounce_seconds = change
    if memory.changed_since is None or memory.changed_why != why:
        draft.remember(run_id, changed_since=now, changed_why=why)
    elif (
        now - memory.changed_since >= debounce_seconds
        and plan_spacing.may_issue(draft.state, run_id, policy, attendance, now)
        and issue_replica_plan(draft, run_id, attendance.members, reason)
    ):
        draft.remember(run_id, question=None, answered_question=None, left_out={}, no_plan_reason="")


def _end_fetches(draft: Draft, run_id: str) -> None:
    """Drop preparation, standbys and copies, which only plans with routes have."""
    memory = draft.state.memory[run_id]
    if memory.preparation is not None:
        draft.remember(run_id, preparation=None)
    if memory.standby_fetches or memory.copy_fetches:
        draft.remember(run_id, standby_fetches={}, copy_fetches={})


def _replica_change(
    state: State, policy: Policy, members: tuple[str, ...], plan: Plan
) -> tuple[ReplanReason, str, float] | None:
    """Why a new replica plan is due (for `changed_why` and as text), and its debounce seconds; None if none is due."""
    spans = dict.fromkeys(members, range(plan.layers))
    voters = tuple(sorted(quorum_guard.voters_to_keep(state, plan.run_id, spans)))
    others = members != tuple(sorted(plan.stages)) or voters != plan.standbys
    if others or may_follow_newer_plan(state, plan.run_id) or _has_pipelines(plan):
        reason = _change_text(state, plan, members, voters) or _same_members(plan)
        return ReplanReason.MEMBERS, reason, policy.debounce_seconds
    if probation_changed(state, plan):
        return ReplanReason.PROBATION, probation_text(state, plan), policy.reshare_after_seconds
    return _share_change(state, policy, members, plan)


def _share_change(
    state: State, policy: Policy, members: tuple[str, ...], plan: Plan
) -> tuple[ReplanReason, str, float] | None:
    """Why new reduce shares are due, as in `_replica_change`."""
    reducers = sorted(plan.without_probation(set(members)) or set(members))
    speedup = reshare_speedup(reported_links(state, reducers), reduce_rates(plan))
    if speedup <= MIN_RESHARE_SPEEDUP:
        return None
    if math.isinf(speedup):
        return ReplanReason.REACH, RESHARE_REASON, policy.debounce_seconds
    return ReplanReason.LINKS, RESHARE_REASON, policy.reshare_after_seconds


def _change_text(state: State, plan: Plan, members: tuple[str, ...], voters: tuple[str, ...]) -> str:
    """Describe which nodes join, leave, train again, or stay only to vote."""
    names = ", ".join(sorted(state.nodes[peer].name for peer in voters))
    kept = f"{names} only {'votes' if len(voters) == 1 else 'vote'}: without them nobody could decide" if voters else ""
    returned = [state.nodes[peer].name for peer in members if peer in plan.standbys]
    again = f"{', '.join(returned)} trains again" if returned else ""
    change = membership_change(state, plan.members, (*members, *voters))
    return "; ".join(filter(None, (change, again, kept)))


def _has_pipelines(plan: Plan) -> bool:
    return len(plan.routes) < len(plan.stages)


def _same_members(plan: Plan) -> str:
    return "all nodes can hold all layers" if _has_pipelines(plan) else "the coordinator was restored from a backup"
