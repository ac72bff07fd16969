"""What the planner is asked of a run: its nodes as they are now, its layers, what they follow. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.coordinator.live.attendance import Attendance, attendance_of
from atoll.coordinator.live.pinning import pinned_spans
from atoll.coordinator.planner.plan_builder import routes_of
from atoll.coordinator.planner.question import (
    NamedRoute,
    PlannerNode,
    Question,
    has_planner_inputs,
    memory_figures,
    status_for_span,
)
from atoll.coordinator.state import availability
from atoll.coordinator.state.peer_paths import recent_paths
from atoll.coordinator.state.snapshot import LiveNode, Policy, RunMemory, State, StepTime
from atoll.core.errors import InvalidTransition
from atoll.core.plan import Plan
from atoll.v1 import plan_pb2

UNPREPARED_HOLD_SECONDS = 600.0  # for which who did not fetch its layers in time is given none, at least


def build_question(state: State, now: StepTime, run_id: str, policy: Policy) -> Question:
    """What the planner has to find for a run as things are now. Raises `InvalidTransition` before genesis."""
    run, memory = state.runs[run_id], state.memory[run_id]
    if not run.genesis:
        raise InvalidTransition(
            f"run {run_id!r} has no layer table yet: there is nothing to plan",
            "it gets one when its genesis is written",
        )
    attendance = attendance_of(state, run_id, now.monotonic)
    usable = _usable(state, memory, attendance, now.monotonic)
    return Question(
        number=memory.questions + 1,
        nodes=tuple(_measured(state, memory, peer, now) for peer in usable),
        layers=plan_pb2.LayerTable.FromString(run.layers),
        spec=memory.spec,
        pins=pinned_spans(state, usable),
        kept=_spans_to_keep(state, memory, usable, now.monotonic),
        current=routes_by_name(state, memory.plan),
        routes=routes_of(memory.plan) if memory.plan else (),
        standbys=_standbys(state, memory.plan),
        preferences=policy.preferences,
        seconds=policy.solve_seconds,
        steps=policy.solve_steps,
    )


def planning_inputs(state: State, run_id: str, attendance: Attendance) -> tuple[tuple[object, ...], ...]:
    """Who may have a part, with what decides which spans it may hold: also who is silent for a moment."""
    profiles = ((peer, live_of(state, peer).profile) for peer in sorted({*attendance.eligible, *attendance.awaited}))
    return tuple(
        (peer, memory_figures(profile), has_planner_inputs(profile), state.nodes[peer].pin)
        for peer, profile in profiles
    )


def may_follow_newer_plan(state: State, run_id: str) -> bool:
    """Whether a restore made nodes follow a newer plan than ours."""
    run, plan = state.runs[run_id], state.memory[run_id].plan
    return plan is not None and run.plan_floor >= plan.version


def is_unprepared(memory: RunMemory, peer: str, now: float) -> bool:
    """Whether this node was given layers lately that it did not fetch in time."""
    return now < memory.prepare_retry_at.get(peer, now)


def lately(slow: Mapping[str, float], peer: str, now: float) -> bool:
    """Whether a node was too slow not long ago; `slow`: when each was, by peer id."""
    at = slow.get(peer)
    return at is not None and now - at < UNPREPARED_HOLD_SECONDS


def _usable(state: State, memory: RunMemory, attendance: Attendance, now: float) -> tuple[str, ...]:
    """Who may have a part in a new plan: who told what a planner needs, and is a stage or fetched what it was given."""
    able = sorted({*attendance.eligible, *attendance.awaited})
    stages = memory.plan.stages if memory.plan is not None else ()
    return tuple(
        peer
        for peer in able
        if has_planner_inputs(live_of(state, peer).profile) and (peer in stages or not is_unprepared(memory, peer, now))
    )


def _spans_to_keep(state: State, memory: RunMemory, peers: tuple[str, ...], now: float) -> dict[str, tuple[int, int]]:
    """By name: stages that did not fetch other layers lately, and go on with those that they have."""
    plan = memory.plan
    slow = [peer for peer in peers if plan is not None and peer in plan.stages and is_unprepared(memory, peer, now)]
    spans = {state.nodes[peer].name: plan.span(peer) for peer in slow} if plan is not None else {}
    return {name: (span.start, span.stop - 1) for name, span in spans.items()}


def _measured(state: State, memory: RunMemory, peer: str, now: StepTime) -> PlannerNode:
    live, node, plan = live_of(state, peer), state.nodes[peer], memory.plan
    span = plan.span(peer) if plan else range(0)
    planned = plan.assignment(peer) if plan else None
    last = max(item.last_layer for item in plan.assignments) if plan else 0
    alone = planned is None or (planned.first_layer, planned.last_layer) == (0, last)
    return PlannerNode(
        peer_id=peer,
        name=node.name,
        profile=live.profile,
        status=status_for_span(live.status, span.start, span.stop - 1),
        multiaddrs=node.multiaddrs,
        paths=recent_paths(live.paths, now.monotonic),
        alone=alone,
        availability=availability.availability(node, live, now.monotonic),
        failures_per_hour=availability.failures_per_hour(node, live, now.monotonic),
        last_correction=memory.corrections.get(peer, 0.0),
    )


def routes_by_name(state: State, plan: Plan | None) -> tuple[NamedRoute, ...]:
    """The routes of a plan by names of nodes."""
    return tuple(
        tuple((state.nodes[part.peer_id].name, part.first, part.last) for part in route)
        for route in (routes_of(plan) if plan else ())
    )


def _standbys(state: State, plan: Plan | None) -> NamedRoute:
    spans = [(peer, plan.span(peer)) for peer in plan.standbys] if plan is not None else []
    return tuple((state.nodes[peer].name, span.start, span.stop - 1) for peer, span in spans)


def live_of(state: State, peer: str) -> LiveNode:
    return state.live.get(peer) or LiveNode(session=0, seen=0.0)
