"""Handover of a drained stage: it trains until the nodes that get its layers have fetched them. Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.live import planner_question
from atoll.coordinator.live.attendance import attendance_of
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.snapshot import Policy, State
from atoll.coordinator.store.records import Node

MAX_HAND_OVER_SECONDS = 300.0  # in addition to a preparation's own deadline; then the node leaves in any case


def must_hand_over(state: State, node: Node) -> bool:
    """True if other nodes must take over this node's layers before it leaves: it is a stage of a training route."""
    plan = state.memory[node.run_id].plan if node.run_id in state.memory else None
    trains = plan is not None and state.runs[node.run_id].state == "TRAINING"
    return trains and plan is not None and node.peer_id in plan.stages and not plan.is_replica(node.peer_id)


def release_drained(draft: Draft, run_id: str, policy: Policy) -> None:
    """Release drained nodes whose layers are handed over, or whose time for the handover is over."""
    now = draft.now.monotonic
    for node in draft.state.members_of(run_id):
        live = draft.state.live.get(node.peer_id)
        if live is None or not live.handing_over:
            continue
        since = live.drain_since if live.drain_since is not None else now
        coming = draft.state.memory[run_id].preparation
        most = MAX_HAND_OVER_SECONDS + (
            prefetch.fetch_deadline_seconds(coming, policy.prepare_seconds) if coming is not None else 0.0
        )
        if now - since >= most or not must_hand_over(draft.state, node) or _is_settled(draft.state, run_id, now):
            draft.set_live(node.peer_id, replace(live, handing_over=False, drain_since=now))


def _is_settled(state: State, run_id: str, now: float) -> bool:
    """True if the planner has answered for the current attendance and no plan is being prepared."""
    memory, attendance = state.memory[run_id], attendance_of(state, run_id, now)
    if memory.preparation is not None:
        return False  # drained nodes stay members until the prepared plan without them is issued
    asks = memory.question is not None and not memory.question.given_routes
    answered = memory.answered_question
    known = answered is not None and answered.nodes == planner_question.planning_inputs(state, attendance)
    return known and not asks
