"""Builds the planner's question about a run: its present nodes, its layers and its current plan. Pure.

`replan_trigger.py` decides when to ask, and compares `planning_inputs` to see whether an answer is outdated.
"""

from __future__ import annotations

from atoll.coordinator.live.attendance import Attendance, attendance_of, live_of
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
from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.core.errors import InvalidTransition
from atoll.core.plan import Plan
from atoll.v1 import plan_pb2

UNPREPARED_HOLD_SECONDS = 600.0  # for which a node that did not fetch its layers in time gets no new ones, at least


def build_question(state: State, now: StepTime, run_id: str, policy: Policy) -> Question:
    """Build the question for a run in its current state. Raises `InvalidTransition` before genesis."""
    run, memory = state.runs[run_id], state.memory[run_id]
    if not run.genesis:
        raise InvalidTransition(
            f"run {run_id!r} has no layer table yet, so it cannot be planned",
            "wait until its genesis is written",
        )
    attendance = attendance_of(state, run_id, now.monotonic)
    usable = _usable(state, memory, attendance, now.monotonic)
    return Question(
        number=memory.questions_asked + 1,
        nodes=tuple(_measured(state, memory, peer, now) for peer in usable),
        layers=plan_pb2.LayerTable.FromString(run.layers),
        spec=memory.spec,
        pins=pinned_spans(state, usable),
        allowed_spans=_spans_to_keep(state, memory, usable, now.monotonic),
        current=routes_by_name(state, memory.plan),
        routes=routes_of(memory.plan) if memory.plan else (),
        standbys=_standbys(state, memory.plan),
        preferences=policy.preferences,
        seconds=policy.solve_seconds,
        steps=policy.solve_steps,
    )


def planning_inputs(state: State, attendance: Attendance) -> tuple[tuple[object, ...], ...]:
    """The nodes that a plan may use, with all values that decide which spans they can hold."""
    profiles = ((peer, live_of(state, peer).profile) for peer in sorted(attendance.plannable))
    return tuple(
        (peer, memory_figures(profile), has_planner_inputs(profile), state.nodes[peer].pin)
        for peer, profile in profiles
    )


def may_follow_newer_plan(state: State, run_id: str) -> bool:
    """True if the store was restored from a backup, so that nodes may follow a newer plan than this one."""
    run, plan = state.runs[run_id], state.memory[run_id].plan
    return plan is not None and run.plan_floor >= plan.version


def is_unprepared(memory: RunMemory, peer: str, now: float) -> bool:
    """True if a node recently failed to fetch, in time, the layers of a prepared plan."""
    return now < memory.prepare_retry_at.get(peer, now)


def _usable(state: State, memory: RunMemory, attendance: Attendance, now: float) -> tuple[str, ...]:
    """Nodes of the question: plannable, with a profile; newcomers only if not unprepared."""
    stages = memory.plan.stages if memory.plan is not None else ()
    return tuple(
        peer
        for peer in sorted(attendance.plannable)
        if has_planner_inputs(live_of(state, peer).profile) and (peer in stages or not is_unprepared(memory, peer, now))
    )


def _spans_to_keep(state: State, memory: RunMemory, peers: tuple[str, ...], now: float) -> dict[str, tuple[int, int]]:
    """Current spans, by name, of stages that recently failed to fetch other layers in time. They keep these."""
    plan = memory.plan
    slow = [peer for peer in peers if plan is not None and peer in plan.stages and is_unprepared(memory, peer, now)]
    spans = {state.nodes[peer].name: plan.span(peer) for peer in slow} if plan is not None else {}
    return {name: (span.start, span.stop - 1) for name, span in spans.items()}


def _measured(state: State, memory: RunMemory, peer: str, now: StepTime) -> PlannerNode:
    live, node, plan = live_of(state, peer), state.nodes[peer], memory.plan
    span = plan.span(peer) if plan else range(0)
    planned = plan.assignment(peer) if plan else None
    last = max(item.last_layer for item in plan.assignments) if plan else 0
    trains_alone = planned is None or (planned.first_layer, planned.last_layer) == (0, last)
    return PlannerNode(
        peer_id=peer,
        name=node.name,
        profile=live.profile,
        status=status_for_span(live.status, span.start, span.stop - 1),
        multiaddrs=node.multiaddrs,
        paths=recent_paths(live.paths, now.monotonic),
        trains_alone=trains_alone,
        availability=availability.availability(node, live, now.monotonic),
        failures_per_hour=availability.failures_per_hour(node, live, now.monotonic),
        last_correction=memory.corrections.get(peer, 0.0),
    )


def routes_by_name(state: State, plan: Plan | None) -> tuple[NamedRoute, ...]:
    """Routes of a plan, with node names."""
    return tuple(
        tuple((state.nodes[part.peer_id].name, part.first, part.last) for part in route)
        for route in (routes_of(plan) if plan else ())
    )


def _standbys(state: State, plan: Plan | None) -> NamedRoute:
    spans = [(peer, plan.span(peer)) for peer in plan.standbys] if plan is not None else []
    return tuple((state.nodes[peer].name, span.start, span.stop - 1) for peer, span in spans)
