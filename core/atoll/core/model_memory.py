"""Memory estimates for a trainer of a whole model, from the spec and the layer table alone. Pure: no torch.

Parameters and gradients are fp32. The layer table does not contain the activations that backward needs. For decoders
they follow from the number of multiplications, which the table contains. The constants were counted on
`node/model/llama.py`, and on an H100 (`benchmarks/results/gpu_hour.json`). Nodes use these figures to refuse a model,
and the coordinator uses them for predictions. `node/model/memory_estimate.py` estimates stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.core.built_in_shape import FP32_BYTES, ModelShape, layer_table
from atoll.core.document_masks import mask_memory
from atoll.core.layer_kinds import is_block
from atoll.core.run_spec import RunSpec
from atoll.v1 import plan_pb2

FLAT_COPIES = 6  # weights, gradients, anchor, weights at the snapshot, AdamW's two moments (Muon has one), each fp32
LOGITS = 3  # logits, their log-softmax, its gradient
_ROUNDING = 1.03  # factor for rounding of allocations and for small tensors
CHUNK_ELEMENTS = 1 << 22  # of a pseudo-gradient that are on the device at once
STACK_ELEMENTS = 1 << 25  # of matrices that Muon steps at once on a GPU; a larger matrix is stepped alone
_STACKED_BYTES = 16  # per element of the matrices that Muon steps at once on a GPU: updates, bf16 copies, products
_ALONE_BYTES = 20  # per element of the largest matrix on a CPU: update, two iterates and two products in fp32


@dataclass(frozen=True)
class BlockActivations:
    """Activations of a whole model's blocks from forward to backward, in bytes per token."""

    kept: float  # by a block
    moving: float  # gradients of a block's widest tensors, which exist at the same time
    width: int  # D
    blocks: int

    def peak(self, vocabulary: int, *, checkpointing: bool) -> float:
        """Largest number of bytes per token during backward: at the logits, or in a block."""
        head = FP32_BYTES * LOGITS * vocabulary + 10 * self.width
        if not checkpointing:
            return self.blocks * self.kept + max(head, self.moving)
        return self.blocks * FP32_BYTES * self.width + max(head, self.kept + self.moving)


def built_in_activations(shape: ModelShape, *, half_precision: bool, cuda: bool) -> BlockActivations:
    """Count the activations of the built-in decoder.

    The residual stream is fp32, and the input of each of a block's two norms is kept. In half precision, each matrix
    keeps a converted copy of its input. On a CPU, torch computes a norm in steps and keeps the intermediate values.
    """
    element = FP32_BYTES // 2 if half_precision else FP32_BYTES
    widths = (24 if half_precision else 26) + (0 if cuda else 6)
    kept = widths * shape.dimension + 2 * element * shape.kv_heads * shape.head_dimension
    hidden = element * shape.hidden_dimension
    return BlockActivations(kept + 4 * hidden, 2 * hidden, shape.dimension, shape.layers)


def replica_memory_bytes(table: plan_pb2.LayerTable, spec: RunSpec, samples: int) -> int:
    """Estimate the memory of a trainer of all layers of any decoder, bytes.

    Counted on Llama, GPT-NeoX and Mixtral. A block keeps about twice the outputs of its matrices: each output, and a
    tensor computed from it. Experts compute in fp32, and AdamW steps them.
    """
    length, section = spec.data.sequence_length, spec.optimizer
    half_precision = section.precision != "fp32"
    width = table.layers[0].activation_bytes_per_token // FP32_BYTES
    vocabulary = table.layers[-1].activation_bytes_per_token // FP32_BYTES
    blocks = [row for row in table.layers if is_block(row.kind)]
    outputs = max((matrix_outputs(row, width, length) for row in blocks), default=0.0)
    experts = any(row.parameters + row.frozen_parameters > 1.2 * row.flops_per_token_forward / 2 for row in blocks)
    element = FP32_BYTES // 2 if half_precision and not experts else FP32_BYTES
    kept = 2 * element * outputs + (18 if half_precision else 8) * width
    activations = BlockActivations(kept, element * outputs / 2, width, len(blocks))
    trained = sum(row.parameters for row in table.layers)
    frozen = sum(row.frozen_parameters for row in table.layers)
    borrowed = borrowed_elements(table, table.layers)
    masks = mask_memory(spec, table.layers, samples).of(1 if section.activation_checkpointing else len(blocks))
    flat = FLAT_COPIES * trained + frozen + borrowed
    working = _working_bytes(spec, samples, activations, vocabulary, trained + frozen)
    return _persistent_and_working(flat, working, trained) + masks


def _persistent_and_working(flat: int, working: int, trained: int) -> int:
    """Add up a trainer's bytes: `flat` fp32 elements, and the larger need of a step or a pseudo-gradient."""
    return FP32_BYTES * flat + max(working, FP32_BYTES * min(trained, CHUNK_ELEMENTS))


def _working_bytes(spec: RunSpec, samples: int, activations: BlockActivations, vocabulary: int, multiplied: int) -> int:
    """Count the bytes of a step beyond persistent ones. `multiplied`: elements of matrices with converted copies."""
    tokens, section = samples * spec.data.sequence_length, spec.optimizer
    converted = FP32_BYTES // 2 * multiplied if section.precision != "fp32" else 0
    peak = _ROUNDING * tokens * activations.peak(vocabulary, checkpointing=section.activation_checkpointing)
    if not section.activation_checkpointing:
        return int(peak) + converted
    forward = tokens * (activations.blocks * FP32_BYTES * activations.width + activations.kept)
    return int(max(peak, forward + converted))


def built_in_memory_bytes(spec: RunSpec, shape: ModelShape, samples: int, *, cuda: bool = False) -> int:
    """Estimate the bytes for training all layers of the built-in decoder, with `samples` samples at once."""
    section = spec.optimizer
    activations = built_in_activations(shape, half_precision=section.precision != "fp32", cuda=cuda)
    matrix = shape.vocabulary * shape.dimension
    in_blocks = shape.layers * (shape.block_parameters - 2 * shape.dimension)
    borrowed = matrix if shape.tie_embeddings else 0  # the head's gradient of a tied matrix
    flat = FLAT_COPIES * shape.parameters - (in_blocks if section.name == "muon" else 0) + borrowed
    blocks = 1 if section.activation_checkpointing else shape.layers
    masks = mask_memory(spec, layer_table(spec, shape).layers, samples).of(blocks)
    working = _working_bytes(spec, samples, activations, shape.vocabulary, in_blocks + matrix)
    working += FP32_BYTES * shape.dimension * shape.hidden_dimension  # a matrix's gradient before it is added
    if section.name == "muon":
        alone = _ALONE_BYTES * shape.dimension * shape.hidden_dimension
        working = max(working, _STACKED_BYTES * min(in_blocks, STACK_ELEMENTS) if cuda else alone)
    return _persistent_and_working(flat, working, shape.parameters) + masks


def matrix_outputs(row: plan_pb2.LayerInfo, width: float, sequence_length: int) -> float:
    """Count the elements that a block's matrices output per token."""
    return row.flops_per_token_forward / 2 / width - sequence_length


def borrowed_elements(table: plan_pb2.LayerTable, rows: Iterable[plan_pb2.LayerInfo]) -> int:
    """Count the elements that these rows borrow from the layers to which they are tied."""
    owners = {row.name: row.parameters for row in table.layers}
    return sum(owners[name] for row in rows for name in row.tied_to)
