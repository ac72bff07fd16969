"""Routes of stages in one process, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from support.in_process_route import InProcessRoute, Pick, as_it_is, oldest
from torch import Tensor

from atoll.core.run_spec import OptimizerSection
from atoll.node.model.span import Span
from atoll.node.model.span_model import Architecture, SpanModel
from atoll.node.pipeline.flush_machine import FlushMachine
from atoll.node.pipeline.inbox import StagePosition
from atoll.node.pipeline.messages import Message
from atoll.node.pipeline.stage import Stage
from atoll.node.pipeline.stage_checks import MicroBatchShape


def equal_cuts(layers: int, stages: int) -> tuple[Span, ...]:
    """Split `layers` into `stages` spans whose lengths differ by at most one, shorter spans first."""
    edges = [layers * stage // stages for stage in range(stages + 1)]
    return tuple(Span(first, end - 1) for first, end in pairwise(edges))


def layer_weights(model: SpanModel, layer: int) -> Tensor:
    """Return a view of one layer's trained weights [E of the layer]."""
    layout, first = model.trained_layout, layer - model.span_definition.span.first
    return model.weights_E[layout.layer_offsets[first] : layout.layer_offsets[first + 1]]


class RouteStages:
    """The stages of one route, and what they hold together."""

    def __init__(
        self,
        architecture: Architecture,
        stages: int | Sequence[Span],
        section: OptimizerSection,
        room: MicroBatchShape,
        ahead: int = 0,
        pick: Pick = oldest,
        carry: Callable[[Message], Message] = as_it_is,
        document_masks: bool = False,
    ) -> None:
        spans = equal_cuts(architecture.layers, stages) if isinstance(stages, int) else tuple(stages)
        self.models = [SpanModel(architecture.span_definition(span), torch.device("cpu")) for span in spans]
        self.stages = [Stage(model, section, room) for model in self.models]
        tied = self.models[0].span_definition.tie is not None
        places = [StagePosition(index, len(spans), tied, ahead) for index in range(len(spans))]
        self.machines = [
            FlushMachine(place, stage, section.clip_norm) for place, stage in zip(places, self.stages, strict=True)
        ]
        self.route = InProcessRoute(self.machines, pick, carry, document_masks)

    def load(self, flat_E: Tensor) -> None:
        """Every layer's trained parameters, from all of them in order."""
        pieces = torch.split(flat_E, [layer_E.numel() for layer_E in self._layers()])
        for layer_E, piece_E in zip(self._layers(), pieces, strict=True):
            layer_E.copy_(piece_E)

    def weights(self) -> Tensor:
        """All trained parameters in the order of the layers."""
        return torch.cat(self._layers())

    def _layers(self) -> list[Tensor]:
        return [
            layer_weights(model, layer)
            for model in self.models
            for layer in range(model.span_definition.span.first, model.span_definition.span.last + 1)
        ]
