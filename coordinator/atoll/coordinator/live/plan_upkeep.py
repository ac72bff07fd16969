"""A run that trains follows its nodes: when the next plan is due. Pure.

Whoever is fit to train is in the plan, and when that set changes and stays changed for the debounce, the next plan is
issued. An empty plan is never issued: nodes keep the last. Where not all can hold everything, `routing` asks a planner.
"""

from __future__ import annotations

import math

from atoll.coordinator.live import replan_trigger
from atoll.coordinator.live.attendance import Attendance, attendance_of, eligible_nodes, membership_change
from atoll.coordinator.live.plan_issue import issue_replica_plan, reduce_rates, reported_links
from atoll.coordinator.planner.reduce_shares import MIN_RESHARE_SPEEDUP, reshare_speedup
from atoll.coordinator.state.run_states import transition_run
from atoll.coordinator.state.snapshot import Draft, Policy
from atoll.core.plan import Plan


def issue_first_plan(draft: Draft, run_id: str) -> None:
    """Genesis is durable: issue plan 1 to every node that is ready for it, unless it takes a planner to make it."""
    state = draft.state
    if replan_trigger.needs_routes(state, run_id, attendance_of(state, run_id, draft.now.monotonic)):
        return
    ready = sorted({*filter(None, [state.memory[run_id].writer]), *eligible_nodes(state, run_id)})
    if ready:
        draft.remember(run_id, question=None, missing="")
        issue_replica_plan(draft, run_id, ready, "the run begins")
        if state.runs[run_id].state == "GENESIS":
            transition_run(draft, run_id, "TRAINING", f"training begins with {len(ready)} nodes")


def update_plan(draft: Draft, run_id: str, policy: Policy) -> None:
    """Issue the next plan, or ask for it, when it is due."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if now < memory.no_plan_before:
        return
    attendance = attendance_of(draft.state, run_id, now)
    if replan_trigger.needs_routes(draft.state, run_id, attendance):
        replan_trigger.follow(draft, run_id, policy, attendance)
    elif memory.plan is None:
        issue_first_plan(draft, run_id)
    else:
        _follow_replicas(draft, run_id, policy, attendance, memory.plan)


def _follow_replicas(draft: Draft, run_id: str, policy: Policy, attendance: Attendance, plan: Plan) -> None:
    if draft.state.memory[run_id].preparation is not None:
        draft.remember(run_id, preparation=None)
    if draft.state.memory[run_id].standbys or draft.state.memory[run_id].copies:
        draft.remember(run_id, standbys={}, copies={})
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    members = attendance.members
    may_follow_newer_plan = (
        draft.state.runs[run_id].plan_floor >= plan.version
    )  # by a restore: nodes may follow a newer plan
    if members and (members != plan.members or may_follow_newer_plan or _has_pipelines(plan)):
        why, patience = "members", policy.debounce_seconds
        reason = membership_change(draft.state, plan.members, members) or _same_members(plan)
    elif (
        members
        and (times := reshare_speedup(reported_links(draft.state, members), reduce_rates(plan))) > MIN_RESHARE_SPEEDUP
    ):
        why, patience = (
            ("reach", policy.debounce_seconds) if math.isinf(times) else ("links", policy.reshare_after_seconds)
        )
        reason = "who reduces how much follows what nodes say of their links"
    else:
        if memory.changed_since is not None:
            draft.remember(run_id, changed_since=None)
        return
    if memory.changed_since is None or memory.changed_why != why:
        draft.remember(run_id, changed_since=now, changed_why=why)
    elif now - memory.changed_since >= patience:
        draft.remember(run_id, question=None, answered_question=None, left_out={}, missing="")
        issue_replica_plan(draft, run_id, members, reason)


def _has_pipelines(plan: Plan) -> bool:
    return len(plan.routes) < len(plan.stages)


def _same_members(plan: Plan) -> str:
    return "all can hold everything now" if _has_pipelines(plan) else "the coordinator was restored from a backup"
