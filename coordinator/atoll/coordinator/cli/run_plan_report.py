"""What `atollctl run plan` prints: facts, a table of nodes, and sentences that say where the figures come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from atoll.coordinator.cli.output import Column, JsonObject
from atoll.coordinator.planner.placement_forecast import Candidate, NodeForecast, NodesForecast, forecast_nodes
from atoll.coordinator.planner.run_forecast import (
    CHECKPOINTS_KEPT,
    KindSize,
    KnownRun,
    Model,
    Rounds,
    Traffic,
    checkpoint_bytes,
    forecast_rounds,
    forecast_traffic,
    known_kinds,
    known_model,
    unknown_of,
)
from atoll.core.clock import SystemClock
from atoll.core.layer_kinds import is_block
from atoll.core.model_spec import ModelSection
from atoll.core.run_spec import RunSpec, spec_warnings
from atoll.core.units import bytes_text, count_text, duration_text

COLUMNS = [
    Column("node"),
    Column("in run", "run", drop_order=2),
    Column("device", drop_order=1),
    Column("lends", align_right=True),
    Column("needs", align_right=True),
    Column("layers that fit", "fits", align_right=True),
    Column("predicted place", "place"),
]


@dataclass(frozen=True)
class RunPlan:
    """All facts about a run that are printed."""

    spec: RunSpec
    model: Model | None
    kinds: tuple[KindSize, ...]
    rounds: Rounds
    traffic: Traffic | None
    nodes: NodesForecast
    step_tokens: int  # of an optimiser step of all nodes
    seconds: float | None  # until stop_tokens
    price_per_hour: float | None  # of a node

    @property
    def cost(self) -> float | None:
        """Cost of all nodes that have a place; None: unknown."""
        placement = self.nodes.placement
        if self.price_per_hour is None or self.seconds is None or placement is None:
            return None
        return self.price_per_hour * placement.placed * self.seconds / 3600


def make_run_plan(
    spec: RunSpec, runs: Sequence[KnownRun], candidates: Sequence[Candidate], price_per_hour: float | None
) -> RunPlan:
    """Compute all facts. Raises `UnsupportedModel`."""
    model = known_model(spec, runs)
    nodes = (
        forecast_nodes(spec, model, candidates, SystemClock())
        if model is not None
        else NodesForecast((), missing="the layers of the model are unknown")
    )
    placement = nodes.placement
    members = placement.routes if placement else spec.run.min_nodes
    cuts, pace, busy = (
        (placement.cuts, placement.tokens_per_second, placement.busy_seconds) if placement else (0, None, 0.0)
    )
    rounds = forecast_rounds(spec, len(model.table.layers) if model else None, members, cuts, pace, busy)
    seconds = spec.run.stop_tokens / pace if pace else None
    return RunPlan(
        spec=spec,
        model=model,
        kinds=known_kinds(spec, model),
        rounds=rounds,
        traffic=forecast_traffic(spec, model, rounds, members, seconds) if model else None,
        nodes=nodes,
        step_tokens=placement.step_tokens if placement else members * spec.tokens_per_step,
        seconds=seconds,
        price_per_hour=price_per_hour,
    )


def document(plan: RunPlan) -> JsonObject:
    """Return all facts as plain values; None: unknown."""
    spec, model, placement = plan.spec, plan.model, plan.nodes.placement
    length = spec.data.sequence_length
    frozen = sum(row.frozen_parameters for row in model.table.layers) if model else None
    return {
        "run_id": spec.run.name,
        "parameters": model.parameters if model else None,
        "frozen_parameters": frozen,
        "kinds": [asdict(kind) for kind in plan.kinds],
        "layers_of_run": (model.origin or None) if model else None,
        "step": {
            "node_tokens": spec.tokens_per_step,
            "node_samples": spec.tokens_per_step // length,
            "tokens": plan.step_tokens,
            "samples": plan.step_tokens // length,
            "nodes": plan.rounds.members,
        },
        "stop_tokens": spec.run.stop_tokens,
        "rounds": asdict(plan.rounds),
        "traffic": asdict(plan.traffic) if plan.traffic else None,
        "memory_bytes": {
            "gpu": model.memory_bytes(spec, cuda=True) if model else None,
            "cpu": model.memory_bytes(spec, cuda=False) if model else None,
        },
        "nodes": [asdict(node) for node in plan.nodes.nodes],
        "predicted": asdict(placement) if placement else None,
        "seconds": plan.seconds,
        "checkpoint_bytes": checkpoint_bytes(model) if model else None,
        "price_per_hour": plan.price_per_hour,
        "cost": plan.cost,
        "notes": list(sentences(plan)),
    }


# --- facts -----------------------------------------------------------------------------------------


def facts(plan: RunPlan) -> list[tuple[str, object]]:
    """Names and values, for one line each."""
    spec, model, rounds = plan.spec, plan.model, plan.rounds
    section, placement = spec.optimizer, plan.nodes.placement
    length = spec.data.sequence_length
    cut = placement is not None and placement.cuts > 0
    what, one = ("route", spec.tokens_per_flush) if cut else ("node", spec.tokens_per_step)
    node_step = f"{count_text(one)} tokens ({one // length} samples) of a {what}"
    all_steps = f"{count_text(plan.step_tokens)} ({plan.step_tokens // length}) of all {rounds.members}"
    fragments = f"; each averages one of {rounds.fragments} fragments" if rounds.fragments > 1 else ""
    return [
        ("run", spec.run.name),
        ("model", _model_name(spec)),
        ("parameters", _parameters(plan)),
        ("optimizer", f"{section.name}, learning rate {section.learning_rate:g}, {section.precision}"),
        ("step", node_step if rounds.members == 1 else f"{node_step}; {all_steps}"),
        ("rounds", f"about {rounds.total:,} until {count_text(spec.run.stop_tokens)} tokens{fragments}"),
        ("round", f"{count_text(rounds.tokens)} tokens; {rounds.steps:.1f} steps of each {what}"),
        *_traffic(plan.traffic, cut=cut),
        ("memory", _memory(plan)),
        ("speed", f"{count_text(placement.tokens_per_second)} tokens/s, predicted" if placement else "–"),
        ("time", f"{duration_text(plan.seconds)} of training, predicted" if plan.seconds is not None else "–"),
        ("checkpoints", _checkpoints(model)),
        *([("cost", _cost(plan))] if plan.price_per_hour is not None else []),
    ]


def _model_name(spec: RunSpec) -> str:
    if isinstance(spec.model, ModelSection):
        return f"built-in decoder, preset {spec.model.preset}"
    trained = ", adapter on a base" if spec.model.adapter else ", from a base" if spec.model.base else ""
    return f"Hugging Face {spec.model.config['model_type']}{trained}"


def _parameters(plan: RunPlan) -> str:
    parts = [
        f"{f'{kind.layers} × ' if is_block(kind.kind) else ''}{kind.kind} {count_text(kind.parameters)}"
        for kind in plan.kinds
    ]
    if plan.model is None:
        return f"at least {', '.join(parts)}" if parts else "–"
    frozen = sum(row.frozen_parameters for row in plan.model.table.layers)
    more = f", and {count_text(frozen)} frozen" if frozen else ""
    return f"{count_text(plan.model.parameters)}{more}: {', '.join(parts)}"


def _traffic(traffic: Traffic | None, *, cut: bool) -> Iterator[tuple[str, str]]:
    if traffic is None:
        yield "averaging", "–"
    elif traffic.holders < 2:
        yield "averaging", f"nothing: no second {'route' if cut else 'node'} holds the model"
    else:
        yield "averaging", f"{bytes_text(traffic.round_bytes)} up and as much down in a round, {traffic.codec}"
        day = f"{bytes_text(traffic.day_bytes)} a day" if traffic.day_bytes is not None else "a day: –"
        yield "", f"{day}; {bytes_text(traffic.run_bytes)} in the whole run"
        if cut:
            yield "", "all stages of a route together; without activations between stages"


def _memory(plan: RunPlan) -> str:
    if plan.model is None:
        return "–"
    gpu, cpu = (bytes_text(plan.model.memory_bytes(plan.spec, cuda=cuda)) for cuda in (True, False))
    return f"{gpu} on a GPU, {cpu} on a CPU for the whole model"


def _checkpoints(model: Model | None) -> str:
    if model is None:
        return "–"
    one = checkpoint_bytes(model)
    return f"{bytes_text(one)} each; up to {bytes_text((CHECKPOINTS_KEPT + 1) * one)} of a node's disk"


def _cost(plan: RunPlan) -> str:
    placement = plan.nodes.placement
    if plan.cost is None or placement is None:
        return "–"
    hours = (plan.seconds or 0.0) / 3600
    return f"{plan.cost:,.2f}: {_count(placement.placed, 'node')} × {hours:,.1f} h × {plan.price_per_hour:g}"


# --- nodes -----------------------------------------------------------------------------------------


def node_rows(plan: RunPlan) -> list[JsonObject]:
    """Rows of the table."""
    layers = len(plan.model.table.layers) if plan.model else 0
    return [
        {
            "node": node.name,
            "run": node.run_id,
            "device": node.device,
            "lends": bytes_text(node.memory_bytes) if node.memory_bytes else "–",
            "needs": bytes_text(node.needed_bytes),
            "fits": _fits(node, layers),
            "place": _place(node, layers),
        }
        for node in plan.nodes.nodes
    ]


def _fits(node: NodeForecast, layers: int) -> str:
    if not node.memory_bytes:
        return "–"
    return f"all {layers}" if node.most_layers >= layers else f"{node.most_layers or 'none'} of {layers}"


def _place(node: NodeForecast, layers: int) -> str:
    if node.route is None:
        return "–"
    whole = node.last - node.first + 1 == layers
    return "whole model" if whole else f"route {node.route}: {node.first}–{node.last}"


# --- sentences -------------------------------------------------------------------------------------


def sentences(plan: RunPlan) -> Iterator[str]:
    """Yield sentences about predictions, assumptions and unknown facts."""
    spec, model, nodes = plan.spec, plan.model, plan.nodes
    yield from (f"unknown: {sentence}" for sentence in unknown_of(spec, model))
    if model is not None and model.origin:
        what = "vocabulary" if model.shape is not None else "layer table"
        yield f"the {what} is that of run {model.origin}, which has the same model"
    if nodes.placement is not None:
        yield from _prediction(plan)
    else:
        yield f"no prediction: {nodes.missing}"
        count = plan.rounds.members
        many = f"{count} equal nodes that each hold" if count > 1 else "one node that holds"
        yield f"counted for {many} all layers, by run.min_nodes"
    if spec.sync.codec == "auto":
        yield "codec auto: counted as int4, with which it starts; on fast links, up to four times as many bytes"
    if model is not None:
        yield f"a node keeps {CHECKPOINTS_KEPT} checkpoints and writes the next; its owner can set checkpoint_keep"
    for node in nodes.nodes:
        if node.unknown_speed:
            yield f"{node.name} is not in the prediction: {node.unknown_speed}"
    yield from (f"note: {warning}" for warning in spec_warnings(spec))


def _prediction(plan: RunPlan) -> Iterator[str]:
    nodes, placement = plan.nodes, plan.nodes.placement
    assert placement is not None
    shape = "each with the whole model" if not placement.cuts else f"in {_count(placement.routes, 'route')}"
    yield (
        f"predicted by the planner for {placement.placed} of {len(nodes.nodes)} connected nodes, {shape}, if they "
        "train nothing else"
    )
    for run_id, how in nodes.measured.items():
        yield f"speed of nodes in run {run_id}: {how}"
    if nodes.unmeasured_links:
        yield f"assumed: the delay between nodes that never measured it ({_count(nodes.unmeasured_links, 'pair')})"
    if nodes.unmeasured_uplinks:
        yield f"assumed: 10 Mbit/s for uplinks that were never measured ({_count(nodes.unmeasured_uplinks, 'node')})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
