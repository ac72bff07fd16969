"""Memory that spans need, and which spans fit a node's memory: from profiles and the layer table. Pure.

The live coordinator uses this before it asks the planner, with the same tables (`span_tables.py`). If a node reports
the memory of the whole model on its device (`whole_model_bytes`), that figure is used, because its trainer uses it,
too.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from atoll.coordinator.planner.problem import (
    INT8_OF_FP32,
    BoolArray,
    FloatArray,
    Layer,
    Links,
    Problem,
    Training,
    read_layers,
)
from atoll.coordinator.planner.question import shares_memory
from atoll.coordinator.planner.span_tables import SpanTables
from atoll.core.document_masks import mask_memory
from atoll.core.run_spec import RunSpec
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

_PIPELINE_RATIO = {  # bytes on the wire per byte of fp32; `auto` uses `int8` where a wide-area link limits a route
    "auto": INT8_OF_FP32,
    "int8": INT8_OF_FP32,
    "bf16": 0.5,
    "fp32": 1.0,
}
_DEVICE_BYTES = 24.0  # per parameter: weight, gradient, AdamW's moments; for outer rounds an anchor and a snapshot
MOST_LAYERS = 1024  # of a model that is cut into spans: tables grow with the square
_CODEC_BYTES = {  # per parameter; `auto` counts as int4, which it starts with
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "int8": 1 + 2 / 128,
    "int4": 0.5 + 2 / 128,
    "int2": 0.25 + 2 / 128,
}


class SpanMemory:
    """Memory of the spans of one model with at most `MOST_LAYERS` layers."""

    def __init__(self, layers: tuple[Layer, ...], training: Training) -> None:
        no_links = Links(np.empty((0, 0)), np.empty((0, 0)))
        self.spans = SpanTables(Problem((), no_links, layers, training))
        self.layers = len(layers)
        self.training = training

    def holds_all(self, profile: mb.NodeProfile) -> bool:
        """True if a node can train all layers, or did not report its memory."""
        return self.fits(profile, 0, self.layers - 1)

    def fits(self, profile: mb.NodeProfile, first: int, last: int) -> bool:
        """True if layers `first` to `last` fit the memory that a node reported, or if it reported none."""
        reported = holds_whole(profile) if (first, last) == (0, self.layers - 1) else None
        if reported is not None:
            return reported
        spans = self.spans
        return bool(_enough(profile, spans.device_bytes[first, last + 1], spans.host_bytes[first, last + 1]))

    def most_layers(self, profile: mb.NodeProfile) -> int:
        """Length of the longest span that fits."""
        if self.holds_all(profile):
            return self.layers
        fitting = self.spans.is_span & ~self.spans.is_whole
        fitting &= _enough(profile, self.spans.device_bytes, self.spans.host_bytes)
        start, end = np.nonzero(fitting)
        return int((end - start).max(initial=0))

    def needed_bytes(self, profile: mb.NodeProfile, first: int, last: int) -> float:
        """Bytes that layers `first` to `last` need of the memory that a node reports as its device's."""
        host = float(self.spans.host_bytes[first, last + 1]) if shares_memory(profile) else 0.0
        return self.device_bytes(first, last) + host

    def device_bytes(self, first: int, last: int) -> float:
        """Bytes of device memory that layers `first` to `last` need."""
        return float(self.spans.device_bytes[first, last + 1])


@lru_cache(maxsize=16)  # called for every node of a run, several times a second
def span_memory(table: bytes, spec: RunSpec) -> SpanMemory | None:
    """Build it from a serialised layer table; None if the table is empty or has more than `MOST_LAYERS`."""
    rows = plan_pb2.LayerTable.FromString(table)
    if not 0 < len(rows.layers) <= MOST_LAYERS:
        return None
    layers = read_layers(rows, spec.data.sequence_length)
    return SpanMemory(layers, training_of(spec, layers))


def holds_whole(profile: mb.NodeProfile) -> bool | None:
    """A node's own report of whether all layers fit; None if it reported nothing."""
    if not profile.device_memory_bytes or not profile.whole_model_bytes:
        return None
    return profile.whole_model_bytes <= profile.device_memory_bytes


def training_of(spec: RunSpec, layers: tuple[Layer, ...]) -> Training:
    """Translate the run spec and the run's layers into the planner's training parameters."""
    optimizer = spec.optimizer
    micro_batches = spec.samples_per_flush // optimizer.micro_batch_samples
    return Training(
        micro_batch_tokens=optimizer.micro_batch_samples * spec.data.sequence_length,
        micro_batches=micro_batches,
        round_tokens=spec.sync.round_tokens,
        activation_ratio=_PIPELINE_RATIO[spec.pipeline.codec],
        gradient_ratio=_PIPELINE_RATIO[spec.pipeline.codec],
        outer_bytes_per_parameter=_CODEC_BYTES.get(spec.sync.codec, _CODEC_BYTES["int4"]),
        masks=mask_memory(spec, layers, optimizer.micro_batch_samples),
        activation_checkpointing=optimizer.activation_checkpointing,
        device_bytes_per_parameter=_DEVICE_BYTES,
        tied_user_bytes_per_parameter=16.0,  # values and gradient, each also in a transfer buffer
        tied_owner_bytes_per_parameter=8.0,
        ahead=spec.pipeline.ahead,
    )


def _enough(profile: mb.NodeProfile, device_bytes: FloatArray, host_bytes: FloatArray) -> BoolArray:
    if not profile.device_memory_bytes:
        return device_bytes < np.inf
    if shares_memory(profile):
        return device_bytes + host_bytes <= profile.device_memory_bytes
    host = profile.host_memory_bytes or np.inf
    return (device_bytes <= profile.device_memory_bytes) & (host_bytes <= host)
