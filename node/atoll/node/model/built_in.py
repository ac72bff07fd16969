"""Span definitions of the built-in decoder (`llama.py`)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from atoll.core.built_in_shape import ModelShape
from atoll.node.model.llama import Decoder, Head
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanDefinition, Tie


class BuiltInArchitecture:
    """The built-in decoder as an `Architecture`."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    @property
    def layers(self) -> int:
        return self.shape.layers + 2

    def span_definition(self, span: Span, activation_checkpointing: bool = False) -> SpanDefinition:
        """Define a span, without allocation. Raises `InvalidRequest` for layers outside the model."""
        span.check_within(self.layers)
        last = self.layers - 1
        with torch.device("meta"):
            decoder = Decoder(self.shape, activation_checkpointing)
            decoder.layers[last] = Head(self.shape)  # always has its own matrix; `SpanModel` ties it
        for index in range(self.layers):
            if index not in span:
                decoder.layers[index] = nn.Identity()
        names = [f"layers.{index}." for index in range(span.first, span.last + 1)]
        named = dict(decoder.named_parameters())
        return SpanDefinition(
            span,
            self.layers,
            self.shape.dimension,
            self.shape.vocabulary,
            decoder,
            lambda x, starts_BT=None: cast("Tensor", decoder(x, starts_BT)),
            tuple({name: each for name, each in named.items() if name.startswith(start)} for start in names),
            "layers.0.weight",
            Tie("layers.0.weight", f"layers.{last}.weight") if self.shape.tie_embeddings else None,
        )
