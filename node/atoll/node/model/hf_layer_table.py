"""Layer table of a Hugging Face decoder, counted on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from atoll.core.built_in_shape import FP32_BYTES
from atoll.core.layer_kinds import BLOCK, EMBEDDING, HEAD, block_kind, is_block
from atoll.node.model.huggingface import HuggingFaceArchitecture
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanDefinition
from atoll.v1 import plan_pb2


def layer_table(
    architecture: HuggingFaceArchitecture, sequence_length: int, model_hash: str, masked_bytes_per_token: int = 0
) -> plan_pb2.LayerTable:
    """Build the layer table, one row per layer, like that of the built-in decoder (`built_in_shape.py`).

    Frozen parameters are counted apart from trained ones. Blocks that differ from one another are of different kinds.
    The FLOPs of a mixture of experts are those of the experts that one token is routed to; its parameters are those of
    all experts. `masked_bytes_per_token`: additional memory of a block with document masks.
    """
    last = architecture.layers - 1
    span_definition = architecture.span_definition(Span(0, last))
    table = plan_pb2.LayerTable(model_hash=model_hash)
    kinds: dict[tuple[object, ...], str] = {}
    for index, parameters in enumerate(span_definition.parameters):
        block, head = 0 < index < last, index == last
        if block:
            kind = kinds.setdefault(_build(architecture, index, parameters), block_kind(len(kinds) + 1))
        else:
            kind = HEAD if head else EMBEDDING
        own = [
            each
            for name, each in parameters.items()
            if span_definition.tie is None or name != span_definition.tie.borrower
        ]
        table.layers.add(
            name=f"{BLOCK}.{index - 1}" if block else kind,
            kind=kind,
            parameters=sum(each.numel() for each in own if each.requires_grad),
            frozen_parameters=sum(each.numel() for each in own if not each.requires_grad),
            flops_per_token_forward=_flops(kind, parameters, span_definition, sequence_length, architecture.config),
            activation_bytes_per_token=FP32_BYTES * (span_definition.vocabulary if head else span_definition.dimension),
            tied_to=[EMBEDDING] if span_definition.tie is not None and head else [],
            masked_bytes_per_token=masked_bytes_per_token if block else 0,
        )
    return table


def _build(
    architecture: HuggingFaceArchitecture, index: int, parameters: Mapping[str, nn.Parameter]
) -> tuple[object, ...]:
    """Return what determines a block's cost: its parameters, and its kind of attention if the model has several."""
    start = len(f"{architecture.module_paths.blocks}.{index - 1}.")
    attention = getattr(architecture.config, "layer_types", None) or ()
    shapes = ((name[start:], each.shape, each.requires_grad) for name, each in parameters.items())
    return (*attention[index - 1 : index], *shapes)


def _flops(
    kind: str, parameters: Mapping[str, Tensor], span_definition: SpanDefinition, sequence_length: int, config: Any
) -> float:
    """Count the FLOPs per token of a layer's forward pass.

    Two per weight that a token is multiplied with, plus causal attention over half the sequence on average.
    """
    if kind == EMBEDDING:
        return 0.0
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None) or 1
    met = sum(_met(each, chosen) for each in parameters.values())
    return 2.0 * met + (2.0 * span_definition.dimension * sequence_length if is_block(kind) else 0.0)


def _met(parameter: Tensor, chosen: int) -> float:
    """Count the elements of a parameter that a token is multiplied with.

    Of a stack of experts, only those that a token is routed to count. Vectors cost very little and count as 0.
    """
    if parameter.dim() < 2:
        return 0.0
    return parameter.numel() * (chosen / parameter.shape[0] if parameter.dim() == 3 else 1.0)
