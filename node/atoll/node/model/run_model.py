"""The model that a run spec names, as trainers need it: cuts, layer table, initial parameters, what it takes.

There are two kinds, the built-in decoder and those of Hugging Face; nobody else needs to know which one a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from atoll.core.model_spec import HuggingFaceModel, ModelSection
from atoll.core.run_spec import RunSpec
from atoll.node.model.built_in import BuiltInArchitecture
from atoll.node.model.built_in_shape import layer_table, resolve_shape
from atoll.node.model.llama import initial_parameters
from atoll.node.model.memory_estimate import built_in_memory_bytes
from atoll.node.model.span import Span
from atoll.node.model.span_model import Architecture, SpanModel, TrainableModel
from atoll.v1 import plan_pb2


class RunModel(Protocol):
    """One run's model on this node."""

    @property
    def architecture(self) -> Architecture:
        """How it is cut."""
        ...

    @property
    def table(self) -> plan_pb2.LayerTable:
        """What its layers are; elements that are trained are those that travel."""
        ...

    def whole_model_bytes(self, samples: int) -> int:
        """What training all layers takes of a device, at least, with so many samples at once."""
        ...

    def check(self, span: Span | None, on_progress: Callable[[], object] = ...) -> None:
        """Look at all that a trainer of the span (of all layers) needs beside data. Raises `PretrainedWeightsUnusable`.

        `on_progress` is called after each file.
        """
        ...

    def initial_parameters(self, span: Span) -> Iterator[tuple[str, Tensor]]:
        """What is trained of the span as it is before the first step, by name in layer order, a layer at a time."""
        ...

    def load_frozen(self, model: TrainableModel) -> None:
        """Give what is frozen its values. Raises `PretrainedWeightsUnusable`, `CheckpointCorrupt`."""
        ...


class BuiltInRunModel:
    """A run of the built-in decoder."""

    def __init__(self, spec: RunSpec, section: ModelSection, vocabulary: int) -> None:
        """Raises `UnsupportedModel`."""
        shape = resolve_shape(section, vocabulary)
        self.architecture = BuiltInArchitecture(shape)
        self.table = layer_table(spec, shape)
        self._spec, self._shape, self._seed = spec, shape, spec.run.seed

    def whole_model_bytes(self, samples: int) -> int:
        return built_in_memory_bytes(self._spec, self._shape, samples)

    def check(self, span: Span | None, on_progress: Callable[[], object] = lambda: None) -> None:
        """It needs nothing."""

    def initial_parameters(self, span: Span) -> Iterator[tuple[str, Tensor]]:
        """One parameter at a time; those before the span are drawn, too, and dropped."""
        for name, values in initial_parameters(self._shape, self._seed):
            if int(name.split(".")[1]) in span:
                yield name, values

    def load_frozen(self, model: TrainableModel) -> None:
        """Nothing of it is frozen."""


def run_model(spec: RunSpec, vocabulary: int, base: Path | None = None) -> RunModel:
    """`vocabulary`: the tokenizer's; `base`: where this node has the run's pretrained weights.

    Raises `UnsupportedModel`, and `ConfigError` where a library is missing.
    """
    if isinstance(spec.model, HuggingFaceModel):
        from atoll.node.model.hf_run_model import HuggingFaceRunModel  # transformers: seconds

        return HuggingFaceRunModel(spec, spec.model, vocabulary, base)
    return BuiltInRunModel(spec, spec.model, vocabulary)


def allocate_span(run: RunModel, span: Span, device: torch.device, activation_checkpointing: bool = False) -> SpanModel:
    """Memory for a span; what is frozen of it has its values, what is trained is zero."""
    model = SpanModel(run.architecture.span_definition(span, activation_checkpointing), device)
    run.load_frozen(model)
    return model


def initialise_into(run: RunModel, model: TrainableModel, anchor_E: Tensor) -> None:
    """Write the run's initial parameters of the model's span."""
    views = dict(model.trained.views(anchor_E))
    for name, values in run.initial_parameters(model.span_definition.span):
        views[name].copy_(values)
