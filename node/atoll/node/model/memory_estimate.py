"""Memory estimates for trainers of stages, from the layer table alone. Pure: no torch.

Parameters and gradients are fp32. A stage recomputes activations: of each micro-batch in flight only the span's input
stays in memory, and the tensors that backward needs exist for one micro-batch at a time. The constants below were
counted on `model/llama.py`. `core/model_memory.py` estimates whole models. The planner has the same formula for stages
(`coordinator/planner/span_memory.py`); a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.built_in_shape import FP32_BYTES
from atoll.core.document_masks import NO_MASKS, MaskMemory
from atoll.core.layer_kinds import is_block
from atoll.core.model_memory import LOGITS, borrowed_elements, matrix_outputs
from atoll.node.model.span import Span
from atoll.v1 import plan_pb2

TOKEN_BYTES = 8
_KEPT_OUTPUTS = 4 / 3  # elements kept from forward to backward, per element that a block's matrices output
_KEPT_WIDTHS = 5.0  # additional vectors of model width that a block keeps
_MOVING_OUTPUTS = 1 / 3  # share of a block's output gradients that exist at the same time
_LARGEST_MATRIX = 0.25  # share of a block's elements; its gradient exists twice until it is added


@dataclass(frozen=True)
class StageTraffic:
    """Micro-batches that a route sends through a stage."""

    micro_batch_tokens: int
    sequence_length: int
    credits: int  # largest number of micro-batches between forward and backward here: the credits of the upstream stage
    masks: MaskMemory = NO_MASKS  # of documents


@dataclass(frozen=True)
class SpanMemory:
    """Memory of a stage by purpose, bytes; in the worst case all of it is in use at once."""

    weights: int
    gradients: int
    optimizer: int  # the two moments of AdamW
    in_flight: int  # inputs of micro-batches that wait for forward or backward
    working: int  # backward of one micro-batch

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.in_flight + self.working


def span_memory(table: plan_pb2.LayerTable, span: Span, traffic: StageTraffic) -> SpanMemory:
    """Estimate the memory of a stage. With adapters, `working` is an upper bound.

    Raises `InvalidRequest` for layers that are not in the table.
    """
    span.check_within(len(table.layers))
    rows = table.layers[span.first : span.last + 1]
    own = sum(row.parameters for row in rows)
    borrowed = borrowed_elements(table, rows)
    here = own + sum(row.frozen_parameters for row in rows) + (0 if span.first == 0 else borrowed)
    return SpanMemory(
        weights=FP32_BYTES * here,
        gradients=FP32_BYTES * (own + borrowed),
        optimizer=2 * FP32_BYTES * own,
        in_flight=_in_flight(table, span, traffic),
        working=_working(table, span, traffic),
    )


def stage_trainer_memory_bytes(table: plan_pb2.LayerTable, span: Span, traffic: StageTraffic) -> int:
    """Estimate the memory of a trainer process that computes a stage, bytes.

    It adds to `span_memory` the memory of outer rounds (an anchor and a snapshot) and of data that waits to be sent or
    used: outputs that the next stage has no room for, and a borrowed matrix, both as received bytes and as tensors.
    """
    own = sum(row.parameters for row in table.layers[span.first : span.last + 1])
    out = table.layers[span.last].activation_bytes_per_token if span.last + 1 < len(table.layers) else 0
    tied = sum(borrowed_elements(table, [row]) for row in table.layers)
    lent = tied if span.first == 0 or span.last + 1 == len(table.layers) else 0
    waiting = traffic.credits * traffic.micro_batch_tokens * out + 2 * FP32_BYTES * lent
    return span_memory(table, span, traffic).total + 2 * FP32_BYTES * own + waiting


def _in_flight(table: plan_pb2.LayerTable, span: Span, traffic: StageTraffic) -> int:
    """Count the bytes of micro-batches in flight: the input of the span, and 8 bytes a token for targets."""
    into = TOKEN_BYTES if span.first == 0 else table.layers[span.first - 1].activation_bytes_per_token
    return traffic.credits * traffic.micro_batch_tokens * (into + TOKEN_BYTES)


def _working(table: plan_pb2.LayerTable, span: Span, traffic: StageTraffic) -> int:
    """Return the bytes of backward's largest phase.

    The phases follow one another: head, blocks, embedding, return of a tied matrix's gradient.
    """
    rows, tokens = table.layers[span.first : span.last + 1], traffic.micro_batch_tokens
    width = table.layers[0].activation_bytes_per_token / FP32_BYTES
    blocks = [row for row in rows if is_block(row.kind)]
    outputs = [matrix_outputs(row, width, traffic.sequence_length) for row in blocks]
    kept = tokens * sum(_KEPT_OUTPUTS * each + _KEPT_WIDTHS * width for each in outputs)
    phases = [float(borrowed_elements(table, rows))]
    for row in rows:
        matrix = _dense(row)
        if row.kind == "head":
            logits = row.activation_bytes_per_token / FP32_BYTES
            phases.append(kept + tokens * (2 * width + LOGITS * logits))
            phases.append(kept + tokens * (2 * width + logits) + max(matrix, borrowed_elements(table, rows)))
        elif row.kind == "embedding":
            phases.append(2 * width * tokens + matrix)
    if blocks:
        largest = _LARGEST_MATRIX * max(map(_dense, blocks))
        phases.append(kept + tokens * (2 * width + _MOVING_OUTPUTS * max(outputs)) + largest)
    return int(FP32_BYTES * max(phases)) + traffic.masks.of(len(blocks))


def _dense(row: plan_pb2.LayerInfo) -> int:
    """Count the trained elements of a layer's large matrices; 0 for a layer with adapters, which are small."""
    return 0 if row.frozen_parameters else row.parameters


# --- several devices (training/fsdp_model.py) -------------------------------------------------------
# The planner counts a node's memory as that of one device, and several devices together take more for a model. So
# `trainer/loading.py` subtracts the difference from the memory that the node reports.


def padded_rows(samples: int, devices: int) -> int:
    """Round a micro-batch up so that all devices compute equally many rows; some rows may have no weight."""
    return devices * -(-samples // devices)


def usable_bytes(table: plan_pb2.LayerTable, memory_bytes: int, devices: int, share_ratio: float) -> int:
    """Return how much of `memory_bytes` is left for the memory that a single device would need.

    Each device gathers the embedding and the head with their gradient, the block that computes with its gradient, and
    the next block. Each device holds frozen parameters in full. `share_ratio` is how many times an even share the
    largest device takes, because shards are uneven or the samples do not divide evenly.
    """
    largest = max((row.parameters for row in table.layers if is_block(row.kind)), default=0)
    ends = sum(row.parameters for row in table.layers if not is_block(row.kind))
    left = memory_bytes - FP32_BYTES * devices * (2 * ends + 3 * largest)
    copies = devices if any(row.frozen_parameters for row in table.layers) else 1
    return max(0, int(left / (copies * share_ratio)))


def evaluation_copy_bytes(table: plan_pb2.LayerTable) -> int:
    """Count the bytes of the copy that a trainer of all layers needs to evaluate an anchor.

    The copy keeps the trained weights during the evaluation.
    """
    return FP32_BYTES * sum(row.parameters for row in table.layers)
