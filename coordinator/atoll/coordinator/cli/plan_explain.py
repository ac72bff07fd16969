"""`atollctl plan explain`: the plan that a run follows, seen by the planner through what its nodes measured."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.coordinator.cli.client import Client
from atoll.coordinator.cli.output import print_sentences, show
from atoll.coordinator.cli.what_if import COLUMNS, EXPLAIN_TIME_FRACTION, check_writable, draw, rows
from atoll.coordinator.planner.checks import check_layout, check_problem, without_unfit_pins
from atoll.coordinator.planner.cost import evaluate
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.explain import explain
from atoll.coordinator.planner.problem import Goal, Layout, Pin, Problem, Stage, read_layers
from atoll.coordinator.planner.problem_from_nodes import problem_from_nodes, wishes_of
from atoll.coordinator.planner.question import PathMeasurement, PlannerNode, Preferences, status_for_span
from atoll.coordinator.planner.report import document, facts
from atoll.coordinator.planner.solve import Solution, solve
from atoll.coordinator.sanitize import clean
from atoll.core.clock import SystemClock
from atoll.core.errors import InvalidTransition
from atoll.core.output import Output
from atoll.core.run_spec import parse_run_spec
from atoll.core.units import count_text
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import plan_pb2

_DEFAULT_PREFERENCES = Preferences()
_ROUNDS = 20  # the last ones, whose pace is compared


@dataclass(frozen=True)
class RunningPlan:
    """A run's plan as a problem and a layout, and what was measured of the whole."""

    problem: Problem
    layout: Layout
    doubts: tuple[str, ...]
    tokens_per_second: float  # that its members say they train now
    round_seconds: float | None  # between the last rounds; None: too few


def tell(client: Client, run_id: str, seconds: float, output: Output, svg: Path | None = None) -> None:
    """Fetch, evaluate, explain, print, draw.

    Raises `ConfigError` for a file that cannot be written, `InvalidTransition` before there is a plan to explain.
    """
    check_writable(svg)
    run = client.call(client.stub.GetRun, wire.RunRequest(run_id=run_id))
    if not run.plan_version:
        raise InvalidTransition(f"run {run.run_id} has no plan yet", "it gets one when training begins")
    view = client.call(client.stub.GetPlan, wire.GetPlanRequest(run_id=run.run_id))
    nodes = client.call(client.stub.ListNodes, wire.ListNodesRequest(run_id=run.run_id)).nodes
    after = max(0, run.head_round - _ROUNDS)
    rounds = client.call(client.stub.ListRounds, wire.ListRoundsRequest(run_id=run.run_id, after_round=after)).rounds
    live = live_plan(run, view.plan, nodes, rounds, preferences_of(view))
    clock, rng = SystemClock(), random.Random(0)
    tables = CostTables(live.problem)
    now = Solution(tables, evaluate(tables, live.layout), 0.0, 0, 0.0)
    why = explain(now, clock=clock, rng=rng, seconds=EXPLAIN_TIME_FRACTION * seconds)
    best = solve(live.problem, clock=clock, rng=rng, seconds=seconds, start=live.layout)
    measured = {"tokens_per_second": live.tokens_per_second, "round_seconds": live.round_seconds}
    told = {"plan": document(now, why), "measured": measured, "doubts": live.doubts, "best": layout_document(best)}
    draw(svg, now, why)
    show(output, told, COLUMNS, rows(why.places))
    if output is Output.TEXT:
        print()
        print_sentences((*predicted_and_measured(now, live), *facts(why), *advice(now, best), *live.doubts))


def preferences_of(view: wire.PlanView) -> Preferences:
    """What the coordinator's settings say; the usual ones where it did not tell them."""
    told = view.wishes
    if told.goal not in set(Goal):
        return Preferences()
    return Preferences(told.goal, told.hysteresis, told.horizon_seconds, told.rtt_cap_seconds)


def live_plan(
    run: wire.RunView,
    plan: plan_pb2.Plan,
    nodes: Sequence[wire.NodeView],
    rounds: Sequence[wire.RoundView],
    preferences: Preferences = _DEFAULT_PREFERENCES,
) -> RunningPlan:
    """From the coordinator's answers. Raises `InvalidTransition` while a member has not said what it is."""
    by_peer = {node.peer_id: node for node in nodes}
    members = [by_peer[item.peer_id] for item in plan.assignments if item.peer_id in by_peer]
    silent = [node.name for node in members if not node.profile.device]
    if silent or len(members) < len(plan.assignments):
        raise InvalidTransition(
            f"{', '.join(map(clean, silent)) or 'a member'} has not told what it is since the coordinator started",
            "ask again when it is connected",
        )
    spec, pins = parse_run_spec(run.spec_toml), []
    for node, name in _distinct_names(members):
        first, _, last = node.pin.partition("-")
        pins += [Pin(name, (int(first), int(last)))] if last else []
    alone = {route.peer_ids[0] for route in plan.routes if len(route.peer_ids) == 1}
    spans = {item.peer_id: (item.span.first, item.span.last) for item in plan.assignments}
    known = [
        _measured(node, name, spans[node.peer_id], trains_alone=node.peer_id in alone)
        for node, name in _distinct_names(members)
    ]
    seen = problem_from_nodes(
        known, read_layers(run.layers, spec.data.sequence_length), spec, wishes_of(preferences, tuple(pins))
    )
    if seen.refused:
        raise InvalidTransition(f"this plan cannot be judged: {'; '.join(seen.refused.values())}")
    check_problem(seen.problem)
    problem, unfit = without_unfit_pins(seen.problem)
    late = [name for node, name in _distinct_names(members) if not _follows_pin(node, spans[node.peer_id])]
    if late:  # what stands cannot be judged by pins that it does not follow yet
        problem = replace(problem, wishes=replace(problem.wishes, pins=()))
        unfit |= {name: f"{name} is pinned otherwise: this plan does not follow that yet" for name in late}
    place = {node.peer_id: index for index, node in enumerate(members)}
    layout = Layout(tuple(tuple(Stage(place[peer], *spans[peer]) for peer in route.peer_ids) for route in plan.routes))
    check_layout(problem, layout)
    if not evaluate(CostTables(problem), layout).tokens_per_second:
        told = "".join(f"; {why}" for why in unfit.values())
        raise InvalidTransition(
            f"with what its members say now this plan cannot go on{told}", "ask again: plans follow"
        )
    drivers = {route.peer_ids[0] for route in plan.routes}
    trained = sum(node.status.tokens_per_second for node in members if node.connected and node.peer_id in drivers)
    doubts = (*seen.doubts.values(), *unfit.values())
    return RunningPlan(problem, layout, doubts, trained, _median_round_seconds(rounds))


def predicted_and_measured(now: Solution, live: RunningPlan) -> Iterator[str]:
    """What the plan predicts beside what is measured."""
    predicted = now.evaluation.tokens_per_second
    told = f"predicted: {count_text(predicted)} tokens/s"
    if live.tokens_per_second:
        told += f"; its members train {count_text(live.tokens_per_second)}"
    yield told
    told = f"a round: every {now.evaluation.round.seconds:.0f} s"
    yield told if live.round_seconds is None else f"{told}; the last ones came every {live.round_seconds:.0f} s"


def advice(now: Solution, best: Solution) -> Iterator[str]:
    """What another layout of the same machines would bring."""
    cheap = now.problem.wishes.goal is Goal.PRICE
    gain = best.evaluation.score / max(now.evaluation.score, 1e-300) - 1
    if gain < 0.01:
        yield f"no other layout of these machines would be noticeably {'cheaper' if cheap else 'faster'}"
        return
    stages = Counter(len(route) for route in best.evaluation.layout.routes)
    shapes = ", ".join(f"{count} × {length}" for length, count in sorted(stages.items()))
    what = " of tokens for the same money" if cheap else ""
    yield f"another layout would reach {100 * gain:+.0f} %{what}: routes × stages {shapes}"


def layout_document(best: Solution) -> dict[str, object]:
    """The planner's own layout as plain values."""
    names = [machine.name for machine in best.problem.machines]
    return {
        "tokens_per_second": best.evaluation.tokens_per_second,
        "routes": [
            [{"machine": names[stage.machine], "first": stage.first, "last": stage.last} for stage in route]
            for route in best.evaluation.layout.routes
        ],
    }


def _follows_pin(node: wire.NodeView, span: tuple[int, int]) -> bool:
    return node.pin in ("", f"{span[0]}-{span[1]}")


def _measured(node: wire.NodeView, name: str, span: tuple[int, int], *, trains_alone: bool) -> PlannerNode:
    paths = {path.peer_id: PathMeasurement(path.rtt_seconds, path.bytes_per_second, 0.0) for path in node.paths}
    there = node.availability or 1.0
    return PlannerNode(
        node.peer_id,
        name,
        node.profile,
        status_for_span(node.status, *span),
        tuple(node.multiaddrs),
        paths,
        trains_alone,
        availability=there,
        failures_per_hour=node.failures_per_hour,
    )


def _distinct_names(nodes: Sequence[wire.NodeView]) -> Iterator[tuple[wire.NodeView, str]]:
    """With names that tell them apart."""
    usage = Counter(node.name for node in nodes)
    for node in nodes:
        yield node, node.name if usage[node.name] == 1 else f"{node.name} …{node.peer_id[-6:]}"


def _median_round_seconds(rounds: Sequence[wire.RoundView]) -> float | None:
    """The median time from one committed round to the next, in seconds."""
    times = {view.round.number: view.unix_ms / 1000 for view in rounds if view.committed and not view.void}
    gaps = [times[number + 1] - times[number] for number in times if number + 1 in times]
    return statistics.median(gaps) if gaps else None
