"""What a span takes of a device's memory, from the layer table alone. Pure: no torch, for planners.

fp32 throughout. Recomputing keeps activations small: of a micro-batch in flight only the span's input stays, and what
backward needs of all its layers exists for one micro-batch at a time. How much that is, is not in the table, but for
decoders it follows from the multiplications that are: the constants below were counted on `model/llama.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.layer_kinds import is_block
from atoll.core.run_spec import RunSpec
from atoll.node.model.built_in_shape import ModelShape
from atoll.node.model.span import Span
from atoll.v1 import plan_pb2

FP32_BYTES = 4
TOKEN_BYTES = 8
_KEPT_OUTPUTS = 4 / 3  # times that the output of a block's matrix is kept between forward and backward
_KEPT_WIDTHS = 5.0  # and vectors of the model's width, a block
_MOVING_OUTPUTS = 1 / 3  # gradients of a block's outputs that exist at once
_REPLICA_COPIES = 6  # weights, gradients, AdamW's moments, anchor, weights at the snapshot
_LOGITS = 3  # logits, their log-softmax, its gradient
_LARGEST_MATRIX = 0.25  # of a block's elements; its gradient exists once more before it is added


@dataclass(frozen=True)
class StageTraffic:
    """What a route sends through a stage."""

    micro_batch_tokens: int
    sequence_length: int
    credits: int  # micro-batches that may be here, forward and not backward: those of the stage upstream


@dataclass(frozen=True)
class SpanMemory:
    """Bytes, all of them at the same moment at worst."""

    weights: int
    gradients: int
    optimizer: int  # AdamW's two moments
    in_flight: int  # inputs of micro-batches that wait here for forward or backward
    working: int  # backward of one micro-batch

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.in_flight + self.working


def span_memory(table: plan_pb2.LayerTable, span: Span, traffic: StageTraffic) -> SpanMemory:
    """Estimate a stage; with adapters `working` is an upper bound.

    Raises `InvalidRequest` for layers that the table lacks.
    """
    span.check_within(len(table.layers))
    rows = table.layers[span.first : span.last + 1]
    own = sum(row.parameters for row in rows)
    borrowed = _borrowed(table, span)
    here = own + sum(row.frozen_parameters for row in rows) + (0 if span.first == 0 else borrowed)
    return SpanMemory(
        weights=FP32_BYTES * here,
        gradients=FP32_BYTES * (own + borrowed),
        optimizer=2 * FP32_BYTES * own,
        in_flight=_in_flight(table, span, traffic),
        working=_working(table, span, traffic),
    )


def stage_trainer_memory_bytes(table: plan_pb2.LayerTable, span: Span, traffic: StageTraffic) -> int:
    """Bytes of a trainer process that has the stage: outer rounds keep an anchor and a snapshot, and messages wait.

    On their way are a borrowed matrix, as it came and as tensors, and outputs that the next stage has no room for.
    """
    own = sum(row.parameters for row in table.layers[span.first : span.last + 1])
    out = table.layers[span.last].activation_bytes_per_token if span.last + 1 < len(table.layers) else 0
    tied = sum(_borrowed(table, Span(row, row)) for row in range(len(table.layers)))
    lent = tied if span.first == 0 or span.last + 1 == len(table.layers) else 0
    waiting = traffic.credits * traffic.micro_batch_tokens * out + 2 * FP32_BYTES * lent
    return span_memory(table, span, traffic).total + 2 * FP32_BYTES * own + waiting


def replica_memory_bytes(
    table: plan_pb2.LayerTable,
    micro_batch_tokens: int,
    sequence_length: int,
    *,
    half_precision: bool,
    checkpointing: bool,
) -> int:
    """Bytes of a trainer of all layers, which recomputes nothing or, with checkpointing, every block.

    `half_precision`: matrices are multiplied in 16 bits, and what they give is kept so.
    """
    width = table.layers[0].activation_bytes_per_token / FP32_BYTES
    vocabulary = table.layers[-1].activation_bytes_per_token / FP32_BYTES
    blocks = [row for row in table.layers if is_block(row.kind)]
    kept = [_KEPT_OUTPUTS * _outputs(row, width, sequence_length) + _KEPT_WIDTHS * width for row in blocks]
    activations = max(kept, default=0.0) + len(kept) * width if checkpointing else sum(kept)
    trained = sum(row.parameters for row in table.layers)
    beside = sum(row.frozen_parameters for row in table.layers) + _borrowed(table, Span(0, len(table.layers) - 1))
    per_token = activations * (FP32_BYTES / 2 if half_precision else FP32_BYTES) + 2 * FP32_BYTES * vocabulary
    return FP32_BYTES * (_REPLICA_COPIES * trained + beside) + int(micro_batch_tokens * per_token)


def _outputs(row: plan_pb2.LayerInfo, width: float, sequence_length: int) -> float:
    """Numbers that a block's matrices give of a token."""
    return row.flops_per_token_forward / 2 / width - sequence_length


def _borrowed(table: plan_pb2.LayerTable, span: Span) -> int:
    """Elements that layers of the span use and others own."""
    owners = {row.name: row.parameters for row in table.layers}
    return sum(owners[name] for row in table.layers[span.first : span.last + 1] for name in row.tied_to)


def _in_flight(table: plan_pb2.LayerTable, span: Span, traffic: StageTraffic) -> int:
    into = TOKEN_BYTES if span.first == 0 else table.layers[span.first - 1].activation_bytes_per_token
    return traffic.credits * traffic.micro_batch_tokens * (into + TOKEN_BYTES)


def _working(table: plan_pb2.LayerTable, span: Span, traffic: StageTraffic) -> int:
    """The largest of the phases of backward, which follow each other: head, blocks, embedding, return of a tie."""
    rows, tokens = table.layers[span.first : span.last + 1], traffic.micro_batch_tokens
    width = table.layers[0].activation_bytes_per_token / FP32_BYTES
    blocks = [row for row in rows if is_block(row.kind)]
    outputs = [_outputs(row, width, traffic.sequence_length) for row in blocks]
    kept = tokens * sum(_KEPT_OUTPUTS * each + _KEPT_WIDTHS * width for each in outputs)
    phases = [float(_borrowed(table, span))]
    for row in rows:
        matrix = _dense(row)
        if row.kind == "head":
            logits = row.activation_bytes_per_token / FP32_BYTES
            phases.append(kept + tokens * (2 * width + _LOGITS * logits))
            phases.append(kept + tokens * (2 * width + logits) + max(matrix, _borrowed(table, span)))
        elif row.kind == "embedding":
            phases.append(2 * width * tokens + matrix)
    if blocks:
        largest = _LARGEST_MATRIX * max(map(_dense, blocks))
        phases.append(kept + tokens * (2 * width + _MOVING_OUTPUTS * max(outputs)) + largest)
    return int(FP32_BYTES * max(phases))


def _dense(row: plan_pb2.LayerInfo) -> int:
    """Elements of its large matrices that are trained; adapters are thin."""
    return 0 if row.frozen_parameters else row.parameters


FLAT_COPIES = 6  # weights, gradients, two AdamW moments, anchor, weights at the snapshot: fp32 each


_SAVED_PER_BLOCK = 14  # [B,T,D]-sized fp32 tensors that one block saves for backward, MLP included


def built_in_memory_bytes(spec: RunSpec, shape: ModelShape, samples: int) -> int:
    """A lower estimate of what training takes: the flat copies, and what backward needs of so many samples at once."""
    tokens = samples * spec.data.sequence_length
    width = 4 if spec.optimizer.precision == "fp32" else 2
    blocks = 1 if spec.optimizer.activation_checkpointing else shape.layers
    saved = blocks * _SAVED_PER_BLOCK * shape.dimension + shape.layers * shape.dimension
    borrowed = shape.vocabulary * shape.dimension if shape.tie_embeddings else 0  # the head's gradient of a tied matrix
    return 4 * (FLAT_COPIES * shape.parameters + borrowed) + tokens * (width * saved + 2 * 4 * shape.vocabulary)
