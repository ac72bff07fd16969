"""`atollctl plan explain`: evaluate the running plan with the planner, from what its nodes measured.

Rebuilds the planner's problem from the coordinator's answers, evaluates the plan's layout, and searches for a
better one. Nothing is changed on the coordinator.
"""

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
_ROUNDS = 20  # recent rounds from which the round time is measured


@dataclass(frozen=True)
class RunningPlan:
    """A run's plan as a problem and a layout, with the measured speed."""

    problem: Problem
    layout: Layout
    doubts: tuple[str, ...]
    tokens_per_second: float  # sum over its members' latest reports
    round_seconds: float | None  # between the last rounds; None: too few rounds


def explain_running_plan(client: Client, run_id: str, seconds: float, output: Output, svg: Path | None = None) -> None:
    """Fetch, evaluate, explain, print, draw.

    Raises `ConfigError` for an unwritable file, `InvalidTransition` while the run has no plan.
    """
    check_writable(svg)
    run = client.call(client.stub.GetRun, wire.RunRequest(run_id=run_id))
    if not run.plan_version:
        raise InvalidTransition(f"run {run.run_id} has no plan yet", "the coordinator issues one when training begins")
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
    result = {"plan": document(now, why), "measured": measured, "doubts": live.doubts, "best": layout_document(best)}
    draw(svg, now, why)
    show(output, result, COLUMNS, rows(why.places))
    if output is Output.TEXT:
        print()
        print_sentences((*predicted_and_measured(now, live), *facts(why), *advice(now, best), *live.doubts))


def preferences_of(view: wire.PlanView) -> Preferences:
    """Preferences from the coordinator's settings; the defaults if it sent none."""
    sent = view.wishes
    if sent.goal not in set(Goal):
        return Preferences()
    return Preferences(sent.goal, sent.hysteresis, sent.horizon_seconds, sent.rtt_cap_seconds)


def live_plan(
    run: wire.RunView,
    plan: plan_pb2.Plan,
    nodes: Sequence[wire.NodeView],
    rounds: Sequence[wire.RoundView],
    preferences: Preferences = _DEFAULT_PREFERENCES,
) -> RunningPlan:
    """Build problem and layout from the coordinator's answers.

    Raises `InvalidTransition` while a member of the plan has not reported its profile.
    """
    by_peer = {node.peer_id: node for node in nodes}
    members = [by_peer[item.peer_id] for item in plan.assignments if item.peer_id in by_peer]
    silent = [node.name for node in members if not node.profile.device]
    if silent or len(members) < len(plan.assignments):
        raise InvalidTransition(
            f"{', '.join(map(clean, silent)) or 'a member'} has not reported a profile since the coordinator started",
            "try again when it is connected",
        )
    spec, pins = parse_run_spec(run.spec_toml), []
    for node, name in distinct_names(members):
        first, _, last = node.pin.partition("-")
        pins += [Pin(name, (int(first), int(last)))] if last else []
    alone = {route.peer_ids[0] for route in plan.routes if len(route.peer_ids) == 1}
    spans = {item.peer_id: (item.span.first, item.span.last) for item in plan.assignments}
    known = [
        planner_node(node, name, spans[node.peer_id], trains_alone=node.peer_id in alone)
        for node, name in distinct_names(members)
    ]
    seen = problem_from_nodes(
        known, read_layers(run.layers, spec.data.sequence_length), spec, wishes_of(preferences, tuple(pins))
    )
    if seen.refused:
        raise InvalidTransition(f"this plan cannot be evaluated: {'; '.join(seen.refused.values())}")
    check_problem(seen.problem)
    problem, unfit = without_unfit_pins(seen.problem)
    late = [name for node, name in distinct_names(members) if not _follows_pin(node, spans[node.peer_id])]
    if late:  # the plan does not follow these pins yet, so evaluate it without pins
        problem = replace(problem, wishes=replace(problem.wishes, pins=()))
        unfit |= {name: f"{name} has a pin that this plan does not follow yet" for name in late}
    place = {node.peer_id: index for index, node in enumerate(members)}
    layout = Layout(tuple(tuple(Stage(place[peer], *spans[peer]) for peer in route.peer_ids) for route in plan.routes))
    check_layout(problem, layout)
    if not evaluate(CostTables(problem), layout).tokens_per_second:
        reasons = "".join(f"; {why}" for why in unfit.values())
        raise InvalidTransition(
            f"this plan does not fit what its members report now{reasons}",
            "try again after the next plan is issued",
        )
    drivers = {route.peer_ids[0] for route in plan.routes}
    trained = sum(node.status.tokens_per_second for node in members if node.connected and node.peer_id in drivers)
    doubts = (*seen.doubts.values(), *unfit.values())
    return RunningPlan(problem, layout, doubts, trained, _median_round_seconds(rounds))


def predicted_and_measured(now: Solution, live: RunningPlan) -> Iterator[str]:
    """Sentences that compare predicted and measured speed."""
    predicted = now.evaluation.tokens_per_second
    speed = f"predicted: {count_text(predicted)} tokens/s"
    if live.tokens_per_second:
        speed += f"; measured: {count_text(live.tokens_per_second)} tokens/s"
    yield speed
    interval = f"predicted: a round every {now.evaluation.round.seconds:.0f} s"
    yield interval if live.round_seconds is None else f"{interval}; measured: every {live.round_seconds:.0f} s"


def advice(now: Solution, best: Solution) -> Iterator[str]:
    """Sentence on the gain of another layout of the same machines."""
    cheap = now.problem.wishes.goal is Goal.PRICE
    gain = best.evaluation.score / max(now.evaluation.score, 1e-300) - 1
    if gain < 0.01:
        yield f"no other layout of these machines would be noticeably {'cheaper' if cheap else 'faster'}"
        return
    stages = Counter(len(route) for route in best.evaluation.layout.routes)
    shapes = ", ".join(f"{count} × {length}" for length, count in sorted(stages.items()))
    unit = " of tokens for the same money" if cheap else ""
    yield f"another layout would reach {100 * gain:+.0f} %{unit}: routes × stages {shapes}"


def layout_document(best: Solution) -> dict[str, object]:
    """The best layout found, as plain values."""
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


def planner_node(node: wire.NodeView, name: str, span: tuple[int, int], *, trains_alone: bool) -> PlannerNode:
    """A node in the planner's form: its reports, with the compute time of `span` only."""
    paths = {path.peer_id: PathMeasurement(path.rtt_seconds, path.bytes_per_second, 0.0) for path in node.paths}
    availability = node.availability or 1.0
    return PlannerNode(
        node.peer_id,
        name,
        node.profile,
        status_for_span(node.status, *span),
        tuple(node.multiaddrs),
        paths,
        trains_alone,
        availability=availability,
        failures_per_hour=node.failures_per_hour,
    )


def distinct_names(nodes: Sequence[wire.NodeView]) -> Iterator[tuple[wire.NodeView, str]]:
    """Nodes with names that are unique among them."""
    usage = Counter(node.name for node in nodes)
    for node in nodes:
        yield node, node.name if usage[node.name] == 1 else f"{node.name} …{node.peer_id[-6:]}"


def _median_round_seconds(rounds: Sequence[wire.RoundView]) -> float | None:
    """The median time from one committed round to the next, in seconds."""
    times = {view.round.number: view.unix_ms / 1000 for view in rounds if view.committed and not view.void}
    gaps = [times[number + 1] - times[number] for number in times if number + 1 in times]
    return statistics.median(gaps) if gaps else None
