"""Forecast for connected nodes in a run that does not exist yet: their layers and their speed. Pure but for time.

A node reports the speed of the layers of its current run, and of its training. For another model, the times of each
kind of layer are scaled by its FLOPs (the embedding, which has none, by its width): a device is assumed to reach the
same FLOP/s. Nothing is scaled from one precision to another, or between compiled and other code.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atoll.coordinator.planner.checks import check_problem
from atoll.coordinator.planner.cost import Evaluation, evaluate
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import Layout, Problem, Stage, read_layers
from atoll.coordinator.planner.problem_from_nodes import problem_from_nodes, wishes_of
from atoll.coordinator.planner.question import PlannerNode, Preferences, has_planner_inputs
from atoll.coordinator.planner.run_forecast import KnownRun, Model, known_model
from atoll.coordinator.planner.solve import solve
from atoll.coordinator.planner.span_memory import MOST_LAYERS, SpanMemory, training_of
from atoll.core.clock import Clock
from atoll.core.errors import ConfigError
from atoll.core.run_spec import RunSpec
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

_SEARCH_SECONDS = 2.0


@dataclass(frozen=True)
class Candidate:
    """A connected node, and the run whose layers it measured."""

    node: PlannerNode
    run: KnownRun


@dataclass(frozen=True)
class NodeForecast:
    """One node's memory and place with the model."""

    name: str
    run_id: str
    device: str
    memory_bytes: int  # that the node offers; 0: not reported
    needed_bytes: int  # for all layers on a device of this kind
    most_layers: int  # number of layers that fit
    route: int | None = None  # from 1; None: no place, or no prediction
    first: int = 0
    last: int = 0
    unknown_speed: str = ""  # why its speed is unknown


@dataclass(frozen=True)
class Placement:
    """The planner's prediction."""

    routes: int
    placed: int  # number of nodes with a place
    cuts: int
    step_tokens: int  # tokens of an optimiser step of all routes
    tokens_per_second: float
    busy_seconds: float  # of the busiest link, to average each fragment once


@dataclass(frozen=True)
class NodesForecast:
    """All connected nodes, and the prediction if there is one."""

    nodes: tuple[NodeForecast, ...]
    placement: Placement | None = None
    missing: str = ""  # why there is no prediction
    measured: Mapping[str, str] = field(default_factory=dict)  # by run: how its nodes' speeds were used
    unmeasured_links: int = 0  # number of pairs of nodes
    unmeasured_uplinks: int = 0  # number of nodes


def forecast_nodes(spec: RunSpec, model: Model, candidates: Sequence[Candidate], clock: Clock) -> NodesForecast:
    """Place the model on these nodes. Raises nothing: `missing` is the reason if there is no prediction."""
    layers = read_layers(model.table, spec.data.sequence_length)
    if len(layers) > MOST_LAYERS:
        return NodesForecast((), missing=f"the model has {len(layers)} layers; the planner takes {MOST_LAYERS}")
    memory = SpanMemory(layers, training_of(spec, layers))
    corrections = _corrections(candidates)
    moved, rows = [], []
    for candidate in candidates:
        node = _moved(candidate, spec, model, corrections.get(candidate.node.name, 0.0))
        unknown = _why_unknown(candidate, spec)
        rows.append(_row(candidate, node.profile, memory, unknown))
        moved += [] if unknown else [node]
    if not moved:
        return NodesForecast(tuple(rows), missing=_nobody(rows))
    found = NodesForecast(
        tuple(rows),
        measured=_measured(candidates, rows, spec, model),
        unmeasured_links=_unmeasured_links(moved),
        unmeasured_uplinks=sum(not node.status.uplink_bytes_per_second for node in moved),
    )
    problem = problem_from_nodes(moved, layers, spec, wishes_of(Preferences()))
    try:
        check_problem(problem.problem)
        value = _best(problem.problem, memory, clock)
    except ConfigError as error:  # an invalid report, or no feasible plan
        reasons = "; ".join((str(error), *problem.refused.values()))
        return replace(found, missing=reasons)
    return _placed(found, problem.problem, value, spec)


def _best(problem: Problem, memory: SpanMemory, clock: Clock) -> Evaluation:
    """Evaluate the plan that the coordinator would make: replicas if all hold all layers, else the best routes."""
    last = memory.layers - 1
    if all(machine.holds_whole for machine in problem.machines):
        tables = CostTables(problem)
        return evaluate(tables, Layout(tuple((Stage(place, 0, last),) for place in range(len(problem.machines)))))
    return solve(problem, clock=clock, rng=random.Random(0), seconds=_SEARCH_SECONDS).evaluation


def _placed(found: NodesForecast, problem: Problem, value: Evaluation, spec: RunSpec) -> NodesForecast:
    if not value.tokens_per_second:
        return replace(found, missing="no layout of these nodes trains: see what they lend")
    routes = value.layout.routes
    stages = {problem.machines[it.machine].name: (number, it) for number, route in enumerate(routes, 1) for it in route}
    busy = max(value.round.busy_seconds.values(), default=0.0) if value.round.busiest is not None else 0.0
    placement = Placement(
        routes=len(routes),
        placed=len(stages),
        cuts=len({stage.first for route in routes for stage in route} - {0}),
        step_tokens=sum(spec.tokens_per_step if len(route) == 1 else spec.tokens_per_flush for route in routes),
        tokens_per_second=value.tokens_per_second,
        busy_seconds=busy,
    )
    nodes = tuple(_at(row, *stages[row.name]) if row.name in stages else row for row in found.nodes)
    return replace(found, nodes=nodes, placement=placement)


def _at(row: NodeForecast, route: int, stage: Stage) -> NodeForecast:
    return replace(row, route=route, first=stage.first, last=stage.last)


# --- a node's profile for another model -------------------------------------------------------------


def _corrections(candidates: Sequence[Candidate]) -> dict[str, float]:
    """By name: time of training over time of the profile, measured with the layers of each node's own run."""
    found: dict[str, float] = {}
    for run in {it.run.run_id: it.run for it in candidates}.values():
        table = _measured_table(run)
        if table is not None:
            nodes = [it.node for it in candidates if it.run.run_id == run.run_id]
            layers = read_layers(table, run.spec.data.sequence_length)
            found |= problem_from_nodes(nodes, layers, run.spec, wishes_of(Preferences())).corrections
    return found


def _measured_table(run: KnownRun) -> plan_pb2.LayerTable | None:
    """Layers that the nodes of a run measured; None: unknown before its genesis."""
    if any(row.flops_per_token_forward for row in run.layers.layers):
        return run.layers
    model = known_model(run.spec)
    return model.table if model is not None else None


def _why_unknown(candidate: Candidate, spec: RunSpec) -> str:
    """Why a node's speed with this spec is unknown; empty if it is known or can be scaled."""
    own = candidate.run.spec.optimizer
    if not has_planner_inputs(candidate.node.profile):
        return "it has not measured its speed yet"
    if own.precision != spec.optimizer.precision:
        return f"it measured {own.precision}, and this spec trains in {spec.optimizer.precision}"
    if own.compile != spec.optimizer.compile:
        return "only one of its run and this spec compiles the model"
    if _measured_table(candidate.run) is None:
        return f"the layers of run {candidate.run.run_id}, which it measured, are unknown until its genesis"
    return ""


def _moved(candidate: Candidate, spec: RunSpec, model: Model, correction: float) -> PlannerNode:
    """The node as it would be in the new run: its own memory and links, and scaled times."""
    node, profile = candidate.node, mb.NodeProfile()
    profile.CopyFrom(node.profile)
    profile.whole_model_bytes = model.memory_bytes(spec, cuda=node.profile.device.startswith("cuda"))
    del profile.layer_times[:]
    source, target = _measured_table(candidate.run), model.table
    before = {row.kind: row for row in source.layers} if source is not None else {}
    times = {time.kind: time for time in node.profile.layer_times}
    for row in {row.kind: row for row in target.layers}.values():
        if row.kind in times and row.kind in before:
            factor = _cost_ratio(row, before[row.kind])
            profile.layer_times.add(
                kind=row.kind,
                forward_seconds_per_token=factor * times[row.kind].forward_seconds_per_token,
                backward_seconds_per_token=factor * times[row.kind].backward_seconds_per_token,
            )
    flops = sum(row.flops_per_token_forward for row in target.layers)
    if source is not None and flops:
        profile.tokens_per_second *= sum(row.flops_per_token_forward for row in source.layers) / flops
    links = mb.NodeStatus(
        uplink_bytes_per_second=node.status.uplink_bytes_per_second,
        downlink_bytes_per_second=node.status.downlink_bytes_per_second,
    )
    return replace(node, profile=profile, status=links, last_correction=correction or node.last_correction)


def _cost_ratio(row: plan_pb2.LayerInfo, before: plan_pb2.LayerInfo) -> float:
    """Time of a layer over that of another layer of the same kind, at the same FLOP/s, or the same bytes/s."""
    if row.flops_per_token_forward and before.flops_per_token_forward:
        return row.flops_per_token_forward / before.flops_per_token_forward
    if row.activation_bytes_per_token and before.activation_bytes_per_token:
        return row.activation_bytes_per_token / before.activation_bytes_per_token
    return 1.0


# --- description of the result ---------------------------------------------------------------------


def _row(candidate: Candidate, profile: mb.NodeProfile, memory: SpanMemory, unknown: str) -> NodeForecast:
    return NodeForecast(
        name=candidate.node.name,
        run_id=candidate.run.run_id,
        device=profile.device_name or profile.device,
        memory_bytes=profile.device_memory_bytes,
        needed_bytes=profile.whole_model_bytes,
        most_layers=memory.most_layers(profile) if profile.device_memory_bytes else 0,
        unknown_speed=unknown,
    )


def _nobody(rows: Sequence[NodeForecast]) -> str:
    return "the speed of no connected node is known for this spec" if rows else "no node is connected"


def _measured(
    candidates: Sequence[Candidate], rows: Sequence[NodeForecast], spec: RunSpec, model: Model
) -> dict[str, str]:
    """By run: whether speeds were measured with this model, or scaled."""
    used = {it.run.run_id: it.run for it, row in zip(candidates, rows, strict=True) if not row.unknown_speed}
    found = {}
    for run_id, run in used.items():
        table = _measured_table(run)
        same = table is not None and list(table.layers) == list(model.table.layers)
        same_batch = run.spec.optimizer.micro_batch_samples == spec.optimizer.micro_batch_samples
        batch = "" if same_batch else f", in micro-batches of {run.spec.optimizer.micro_batch_samples} samples"
        found[run_id] = f"measured with this model{batch}" if same else f"scaled by FLOPs from its model{batch}"
    return found


def _unmeasured_links(nodes: Sequence[PlannerNode]) -> int:
    """Pairs of which neither has measured the path to the other."""
    return sum(
        other.peer_id not in one.paths and one.peer_id not in other.paths
        for place, one in enumerate(nodes)
        for other in nodes[:place]
    )
