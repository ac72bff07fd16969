"""Memory estimates for trainers, from the layer table alone: a stage's span, or the whole model. Pure: no torch.

Parameters and gradients are fp32. A stage recomputes activations: of each micro-batch in flight only the span's input
stays in memory, and the tensors that backward needs exist for one micro-batch at a time. The layer table does not
contain their size. For decoders it follows from the number of multiplications, which the table contains. The constants
below were counted on `model/llama.py`, and on an H100 (`benchmarks/results/gpu_hour.json`). The planner has the same
formula for stages (`coordinator/planner/span_memory.py`); a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.document_masks import NO_MASKS, MaskMemory, mask_memory
from atoll.core.layer_kinds import is_block
from atoll.core.run_spec import RunSpec
from atoll.node.model.built_in_shape import FP32_BYTES, ModelShape, layer_table
from atoll.node.model.span import Span
from atoll.v1 import plan_pb2

TOKEN_BYTES = 8
_KEPT_OUTPUTS = 4 / 3  # elements kept from forward to backward, per element that a block's matrices output
_KEPT_WIDTHS = 5.0  # vectors of model width that a block keeps besides
_MOVING_OUTPUTS = 1 / 3  # share of a block's output gradients that exist at once
FLAT_COPIES = 6  # weights, gradients, anchor, weights at the snapshot, AdamW's two moments (Muon has one): fp32 each
_LOGITS = 3  # logits, their log-softmax, its gradient
_ROUNDING = 1.03  # what allocations are rounded up by, and small tensors that are not counted
CHUNK_ELEMENTS = 1 << 22  # of a pseudo-gradient on the device at once
STACK_ELEMENTS = 1 << 25  # of matrices that Muon steps at once on a GPU; a larger matrix is alone
_STACKED_BYTES = 16  # per element of the matrices that Muon steps at once on a GPU: updates, bf16 copies, products
_ALONE_BYTES = 20  # per element of the largest matrix on a CPU: update, two iterates and two products in fp32
_LARGEST_MATRIX = 0.25  # share of a block's elements; its gradient exists twice until it is added


@dataclass(frozen=True)
class StageTraffic:
    """Micro-batches that a route sends through a stage."""

    micro_batch_tokens: int
    sequence_length: int
    credits: int  # most micro-batches between forward and backward here: the credits of the upstream stage
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
    """Estimate the memory of a trainer process that computes a stage, bytes.

    It adds to `span_memory` what outer rounds keep (an anchor and a snapshot) and what waits to be sent or used:
    outputs that the next stage has no room for, and a borrowed matrix, both as received bytes and as tensors.
    """
    own = sum(row.parameters for row in table.layers[span.first : span.last + 1])
    out = table.layers[span.last].activation_bytes_per_token if span.last + 1 < len(table.layers) else 0
    tied = sum(_borrowed(table, Span(row, row)) for row in range(len(table.layers)))
    lent = tied if span.first == 0 or span.last + 1 == len(table.layers) else 0
    waiting = traffic.credits * traffic.micro_batch_tokens * out + 2 * FP32_BYTES * lent
    return span_memory(table, span, traffic).total + 2 * FP32_BYTES * own + waiting


@dataclass(frozen=True)
class BlockActivations:
    """What the blocks of a whole model keep from forward to backward, bytes per token."""

    kept: float  # by a block
    moving: float  # gradients of a block's widest tensors, which exist at once
    width: int  # D
    blocks: int

    def peak(self, vocabulary: int, *, checkpointing: bool) -> float:
        """Bytes per token in backward at worst: at the logits, or in a block."""
        head = FP32_BYTES * _LOGITS * vocabulary + 10 * self.width
        if not checkpointing:
            return self.blocks * self.kept + max(head, self.moving)
        return self.blocks * FP32_BYTES * self.width + max(head, self.kept + self.moving)


def built_in_activations(shape: ModelShape, *, half_precision: bool, cuda: bool) -> BlockActivations:
    """Count what the built-in decoder keeps.

    The residual stream is fp32, and the input of each of a block's two norms is kept. In half precision each matrix
    keeps a converted copy of its input. On a CPU, torch computes a norm in steps, and keeps what is between them.
    """
    element = FP32_BYTES // 2 if half_precision else FP32_BYTES
    widths = (24 if half_precision else 26) + (0 if cuda else 6)
    kept = widths * shape.dimension + 2 * element * shape.kv_heads * shape.head_dimension
    hidden = element * shape.hidden_dimension
    return BlockActivations(kept + 4 * hidden, 2 * hidden, shape.dimension, shape.layers)


def replica_memory_bytes(table: plan_pb2.LayerTable, spec: RunSpec, samples: int) -> int:
    """Estimate the memory of a trainer of all layers of any decoder, bytes.

    Counted on Llama, GPT-NeoX and Mixtral. Elements that are kept are about twice the outputs of a block's matrices:
    each output, and what is made of it. Experts compute in fp32, and AdamW steps them.
    """
    length, section = spec.data.sequence_length, spec.optimizer
    half_precision = section.precision != "fp32"
    width = table.layers[0].activation_bytes_per_token // FP32_BYTES
    vocabulary = table.layers[-1].activation_bytes_per_token // FP32_BYTES
    blocks = [row for row in table.layers if is_block(row.kind)]
    outputs = max((_outputs(row, width, length) for row in blocks), default=0.0)
    experts = any(row.parameters + row.frozen_parameters > 1.2 * row.flops_per_token_forward / 2 for row in blocks)
    element = FP32_BYTES // 2 if half_precision and not experts else FP32_BYTES
    kept = 2 * element * outputs + (18 if half_precision else 8) * width
    activations = BlockActivations(kept, element * outputs / 2, width, len(blocks))
    trained = sum(row.parameters for row in table.layers)
    frozen = sum(row.frozen_parameters for row in table.layers)
    borrowed = _borrowed(table, Span(0, len(table.layers) - 1))
    masks = mask_memory(spec, table.layers, samples).of(1 if section.activation_checkpointing else len(blocks))
    flat = FLAT_COPIES * trained + frozen + borrowed
    working = _working_bytes(spec, samples, activations, vocabulary, trained + frozen)
    return _persistent_and_working(flat, working, trained) + masks


def _persistent_and_working(flat: int, working: int, trained: int) -> int:
    """Add up a trainer's bytes: `flat` fp32 elements, and what a step or else a pseudo-gradient needs."""
    return FP32_BYTES * flat + max(working, FP32_BYTES * min(trained, CHUNK_ELEMENTS))


def _working_bytes(spec: RunSpec, samples: int, activations: BlockActivations, vocabulary: int, multiplied: int) -> int:
    """Count what a step needs besides what persists. `multiplied`: elements of the matrices, for converted copies."""
    tokens, section = samples * spec.data.sequence_length, spec.optimizer
    converted = FP32_BYTES // 2 * multiplied if section.precision != "fp32" else 0
    peak = _ROUNDING * tokens * activations.peak(vocabulary, checkpointing=section.activation_checkpointing)
    if not section.activation_checkpointing:
        return int(peak) + converted
    forward = tokens * (activations.blocks * FP32_BYTES * activations.width + activations.kept)
    return int(max(peak, forward + converted))


def _outputs(row: plan_pb2.LayerInfo, width: float, sequence_length: int) -> float:
    """Count the elements that a block's matrices output per token."""
    return row.flops_per_token_forward / 2 / width - sequence_length


def _borrowed(table: plan_pb2.LayerTable, span: Span) -> int:
    """Count the elements that the span's layers borrow from the layers to which they are tied."""
    owners = {row.name: row.parameters for row in table.layers}
    return sum(owners[name] for row in table.layers[span.first : span.last + 1] for name in row.tied_to)


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
    return int(FP32_BYTES * max(phases)) + traffic.masks.of(len(blocks))


def _dense(row: plan_pb2.LayerInfo) -> int:
    """Count the trained elements of a layer's large matrices; 0 for a layer with adapters, which are small."""
    return 0 if row.frozen_parameters else row.parameters


def built_in_memory_bytes(spec: RunSpec, shape: ModelShape, samples: int, *, cuda: bool = False) -> int:
    """Estimate the memory for training all layers of the built-in decoder, `samples` samples at once, bytes."""
    section = spec.optimizer
    activations = built_in_activations(shape, half_precision=section.precision != "fp32", cuda=cuda)
    matrix = shape.vocabulary * shape.dimension
    in_blocks = shape.layers * (shape.block_parameters - 2 * shape.dimension)
    borrowed = matrix if shape.tie_embeddings else 0  # the head's gradient of a tied matrix
    flat = FLAT_COPIES * shape.parameters - (in_blocks if section.name == "muon" else 0) + borrowed
    blocks = 1 if section.activation_checkpointing else shape.layers
    masks = mask_memory(spec, layer_table(spec, shape).layers, samples).of(blocks)
    working = _working_bytes(spec, samples, activations, shape.vocabulary, in_blocks + matrix)
    working += FP32_BYTES * shape.dimension * shape.hidden_dimension  # a matrix's gradient, before it is added
    if section.name == "muon":
        alone = _ALONE_BYTES * shape.dimension * shape.hidden_dimension
        working = max(working, _STACKED_BYTES * min(in_blocks, STACK_ELEMENTS) if cuda else alone)
    return _persistent_and_working(flat, working, shape.parameters) + masks


# --- several devices (training/fsdp_model.py) -------------------------------------------------------
# The planner counts a node's memory as that of one device, and several devices together take more for a model. So
# `trainer/loading.py` subtracts the difference from the memory that the node reports.


def padded_rows(samples: int, devices: int) -> int:
    """Round a micro-batch up so that all devices compute the same number of rows; some rows may have no weight."""
    return devices * -(-samples // devices)


def usable_bytes(table: plan_pb2.LayerTable, memory_bytes: int, devices: int, share_ratio: float) -> int:
    """Compute how much of `memory_bytes` is left for what one device alone would take.

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

    It keeps the trained weights there meanwhile.
    """
    return FP32_BYTES * sum(row.parameters for row in table.layers)
