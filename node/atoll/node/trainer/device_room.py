"""Whether a span, or the whole model, has room on a node's devices. Allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from atoll.core import log
from atoll.core.document_masks import mask_memory
from atoll.core.errors import ModelTooLarge
from atoll.core.run_spec import RunSpec
from atoll.node.model.local_weights import ShardSlices
from atoll.node.model.memory_estimate import (
    StageTraffic,
    evaluation_copy_bytes,
    padded_rows,
    stage_trainer_memory_bytes,
    usable_bytes,
)
from atoll.node.model.run_model import RunModel
from atoll.node.model.span import Span
from atoll.node.model.span_model import layout_of
from atoll.node.pipeline.schedule import stage_credits
from atoll.node.training.device import DeviceFacts, check_fits


def usable_facts(facts: DeviceFacts, spec: RunSpec, run: RunModel, devices: int) -> DeviceFacts:
    """Facts of `devices` devices together. The memory is reduced by the overhead of sharding the model over them."""
    if devices == 1:
        return facts
    whole, micro_batch = Span(0, run.architecture.layers - 1), spec.optimizer.micro_batch_samples
    rounded = stage_bytes(spec, run, whole, padded_rows(micro_batch, devices)) / stage_bytes(spec, run, whole)
    times = ShardSlices.largest_share_ratio(layout_of(run.architecture.span_definition(whole)), devices) * rounded
    return replace(facts, memory_bytes=usable_bytes(run.table, facts.memory_bytes, devices, times))


def whole_model_bytes(spec: RunSpec, run: RunModel, devices: Sequence[torch.device]) -> int:
    """Memory of all layers on these devices, comparable with the memory in `usable_facts`."""
    aside = evaluation_copy_bytes(run.table) if len(devices) > 1 else 0
    return run.whole_model_bytes(spec.optimizer.micro_batch_samples, cuda=devices[0].type == "cuda") + aside


def has_room(
    spec: RunSpec, run: RunModel, span: Span | None, facts: DeviceFacts, devices: Sequence[torch.device]
) -> bool:
    """True if the span or the whole model fits. False if the whole model does not fit but its smallest layer does.

    Raises `ModelTooLarge` otherwise.
    """
    if span is not None:
        check_stage_fits(spec, run, span, facts)
        return True
    try:
        check_fits(whole_model_bytes(spec, run, devices), facts)
    except ModelTooLarge as error:
        layers = range(run.architecture.layers)
        if min(stage_bytes(spec, run, Span(layer, layer)) for layer in layers) > facts.memory_bytes:
            raise
        log.get("trainer").warning("model_too_large_waiting_for_span", reason=str(error))
        return False
    return True


def stage_bytes(spec: RunSpec, run: RunModel, span: Span, samples: int = 0) -> int:
    """Largest memory that a trainer of a span can need: before a route with one layer per following stage.

    More following stages mean more micro-batches in flight. `samples`: samples computed at once; 0: a micro-batch.
    """
    samples = samples or spec.optimizer.micro_batch_samples
    tokens = samples * spec.data.sequence_length
    micro_batches = spec.samples_per_flush // spec.optimizer.micro_batch_samples
    credits = max(stage_credits(run.architecture.layers - span.first, micro_batches, spec.pipeline.ahead))
    traffic = StageTraffic(tokens, spec.data.sequence_length, credits, mask_memory(spec, run.table.layers, samples))
    return stage_trainer_memory_bytes(run.table, span, traffic)


def check_stage_fits(spec: RunSpec, run: RunModel, span: Span, facts: DeviceFacts) -> None:
    """Raise `ModelTooLarge` if the span does not fit."""
    check_fits(stage_bytes(spec, run, span), facts, f" for {span}")
