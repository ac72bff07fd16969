"""The layer table of a Hugging Face decoder, counted on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from atoll.node.pipeline.huggingface import HuggingFace
from atoll.node.pipeline.span import Span
from atoll.node.pipeline.span_model import Cut
from atoll.v1 import plan_pb2

FP32_BYTES = 4


def layer_table(architecture: HuggingFace, sequence_length: int, model_hash: str) -> plan_pb2.LayerTable:
    """One row per layer, like that of the built-in decoder (`training/shape.py`), frozen parameters beside the others.

    A mixture's FLOPs are those of the experts that one token is sent to; its parameters are all of them.
    """
    last = architecture.layers - 1
    cut = architecture.cut(Span(0, last))
    table = plan_pb2.LayerTable(model_hash=model_hash)
    for index, parameters in enumerate(cut.parameters):
        kind = "embedding" if index == 0 else "head" if index == last else "block"
        tied = cut.tie is not None and kind == "head"
        own = [each for name, each in parameters.items() if cut.tie is None or name != cut.tie.borrower]
        table.layers.add(
            name=f"block.{index - 1}" if kind == "block" else kind,
            kind=kind,
            parameters=sum(each.numel() for each in own if each.requires_grad),
            frozen_parameters=sum(each.numel() for each in own if not each.requires_grad),
            flops_per_token_forward=_flops(kind, parameters, cut, sequence_length, architecture.config),
            activation_bytes_per_token=FP32_BYTES * (cut.vocabulary if kind == "head" else cut.dimension),
            tied_to=["embedding"] if tied else [],
        )
    return table


def _flops(kind: str, parameters: Mapping[str, Tensor], cut: Cut, sequence_length: int, config: Any) -> float:
    """Two per weight that a token meets, and causal attention over half the sequence on average."""
    if kind == "embedding":
        return 0.0
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None) or 1
    met = sum(_met(each, chosen) for each in parameters.values())
    return 2.0 * met + (2.0 * cut.dimension * sequence_length if kind == "block" else 0.0)


def _met(parameter: Tensor, chosen: int) -> float:
    """Elements of a matrix, or of as many of a stack of experts as a token is sent to; vectors cost next to nothing."""
    if parameter.dim() < 2:
        return 0.0
    return parameter.numel() * (chosen / parameter.shape[0] if parameter.dim() == 3 else 1.0)
