"""Shape of the built-in decoder, and the layer table that plans are made from. Pure: no torch, no allocation.

A run spec names a preset and may override any of its numbers. `resolve_shape` computes the final shape and refuses a
shape that cannot be built. `layer_table` counts parameters, FLOPs and bytes per layer by arithmetic. So a run of 7
billion parameters can be planned, or refused by a small device, without an allocation. `node/model/llama.py` builds
exactly this model; a test compares the two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from atoll.core.document_masks import repeated_bytes_per_token
from atoll.core.errors import UnsupportedModel
from atoll.core.model_spec import ModelSection
from atoll.core.run_spec import RunSpec
from atoll.v1 import plan_pb2

FP32_BYTES = 4


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a Llama-compatible decoder."""

    vocabulary: int
    dimension: int
    layers: int  # blocks; the model has two layers more: embedding and head
    heads: int
    kv_heads: int
    hidden_dimension: int
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False

    @property
    def head_dimension(self) -> int:
        return self.dimension // self.heads

    @property
    def block_parameters(self) -> int:
        """Elements of one block: four attention matrices, three MLP matrices, two norms."""
        attention = self.dimension * self.head_dimension * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.dimension * self.hidden_dimension + 2 * self.dimension

    @property
    def parameters(self) -> int:
        """Elements of the whole model, ties counted once."""
        matrices = self.vocabulary * self.dimension * (1 if self.tie_embeddings else 2)
        return matrices + self.layers * self.block_parameters + self.dimension


PRESETS: dict[str, ModelShape] = {
    "nano": ModelShape(256, 128, 4, 4, 2, 448),
    "micro": ModelShape(256, 256, 8, 8, 4, 768),
    "30m": ModelShape(256, 512, 10, 8, 4, 1408),
    "125m": ModelShape(256, 768, 12, 12, 12, 2048, tie_embeddings=True),
    "350m": ModelShape(256, 1024, 24, 16, 16, 2816, tie_embeddings=True),
    "1b": ModelShape(256, 2048, 22, 32, 4, 5632),
    "3b": ModelShape(256, 3072, 28, 24, 8, 8192, rope_theta=500_000.0, tie_embeddings=True),
    "7b": ModelShape(256, 4096, 32, 32, 32, 11008),
}


def resolve_shape(section: ModelSection, tokenizer_vocabulary: int) -> ModelShape:
    """Apply the section's numbers to its preset. Raises `UnsupportedModel` if the numbers do not fit together."""
    chosen = {name: value for name, value in section if name not in ("architecture", "preset") and value is not None}
    chosen.setdefault("vocabulary", tokenizer_vocabulary)
    shape = replace(PRESETS[section.preset], **chosen)
    _check(shape, tokenizer_vocabulary)
    return shape


def _check(shape: ModelShape, tokenizer_vocabulary: int) -> None:
    problem = ""
    if shape.dimension % shape.heads:
        problem = f"dimension {shape.dimension} is not a multiple of heads {shape.heads}"
    elif shape.heads % shape.kv_heads:
        problem = f"heads {shape.heads} is not a multiple of kv_heads {shape.kv_heads}"
    elif shape.head_dimension % 2:
        problem = f"dimension / heads is {shape.head_dimension}; rotary embedding needs an even number"
    elif shape.vocabulary < tokenizer_vocabulary:
        problem = f"vocabulary {shape.vocabulary} is smaller than the tokenizer's {tokenizer_vocabulary}"
    if problem:
        raise UnsupportedModel(
            f"[model] cannot be built: {problem}", f"change [model] in the run spec; resolved shape: {asdict(shape)}"
        )


def layer_table(spec: RunSpec, shape: ModelShape) -> plan_pb2.LayerTable:
    """Build the layer table, one row per layer in model order: embedding, blocks, head."""
    activation_bytes = shape.dimension * FP32_BYTES
    matrix = shape.vocabulary * shape.dimension
    block = plan_pb2.LayerInfo(
        kind="block",
        parameters=shape.block_parameters,
        flops_per_token_forward=_block_flops(shape, spec.data.sequence_length),
        activation_bytes_per_token=activation_bytes,
        masked_bytes_per_token=_masked_bytes(spec, shape),
    )
    table = plan_pb2.LayerTable(model_hash=spec.model_hash())
    table.layers.add(name="embedding", kind="embedding", parameters=matrix, activation_bytes_per_token=activation_bytes)
    for index in range(shape.layers):
        row = table.layers.add()
        row.CopyFrom(block)
        row.name = f"block.{index}"
    table.layers.add(
        name="head",
        kind="head",
        parameters=shape.dimension + (0 if shape.tie_embeddings else matrix),
        flops_per_token_forward=2.0 * matrix,
        activation_bytes_per_token=shape.vocabulary * FP32_BYTES,
        tied_to=["embedding"] if shape.tie_embeddings else [],
    )
    return table


def _masked_bytes(spec: RunSpec, shape: ModelShape) -> int:
    """Count the bytes per token that a block also keeps with document masks: rotations, repeated keys and values."""
    if not spec.data.document_masks:
        return 0
    rotations = 2 * FP32_BYTES * shape.head_dimension
    return rotations + repeated_bytes_per_token(spec, shape.heads, shape.kv_heads, shape.head_dimension)


def _block_flops(shape: ModelShape, sequence_length: int) -> float:
    """Count the FLOPs per token of a block's forward pass.

    Two per element of a matrix, plus causal attention: scores and values over half the sequence on average.
    """
    matrices = shape.block_parameters - 2 * shape.dimension
    attention = 2 * shape.dimension * sequence_length  # 2 products × 2 FLOPs × T/2 × D
    return 2.0 * matrices + attention


def layer_offsets(table: plan_pb2.LayerTable) -> tuple[int, ...]:
    """Compute where each layer starts in the flat parameter vector; the last entry is the vector's length."""
    offsets = [0]
    for row in table.layers:
        offsets.append(offsets[-1] + row.parameters)
    return tuple(offsets)
