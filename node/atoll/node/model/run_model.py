"""The model of a run, for trainers: span definitions, layer table, initial parameters, memory estimate.

`RunModel` hides which kind of model a run trains: the built-in decoder (`BuiltInRunModel`) or a Hugging Face decoder
(`hf_run_model.py`). `run_model` chooses between them from the run spec.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from atoll.core.built_in_shape import layer_table, resolve_shape
from atoll.core.errors import DataDirUnusable
from atoll.core.model_memory import built_in_memory_bytes
from atoll.core.model_spec import HuggingFaceModel, ModelSection
from atoll.core.run_spec import RunSpec
from atoll.node.model.built_in import BuiltInArchitecture
from atoll.node.model.llama import initial_parameters
from atoll.node.model.span import Span
from atoll.node.model.span_model import Architecture, SpanModel, TrainableModel
from atoll.v1 import plan_pb2


class RunModel(Protocol):
    """The model of one run on this node."""

    @property
    def architecture(self) -> Architecture:
        """The architecture from which spans are cut."""
        ...

    @property
    def table(self) -> plan_pb2.LayerTable:
        """The layer table. Its `parameters` are the trained elements, which outer rounds exchange."""
        ...

    def whole_model_bytes(self, samples: int, *, cuda: bool = False) -> int:
        """Estimate the device memory for training all layers, with `samples` samples at once."""
        ...

    def check(self, span: Span | None, on_progress: Callable[[], object] = ...) -> None:
        """Check all files that a trainer of the span (None: of any span) needs in addition to data.

        `on_progress` is called after each file. Raises `PretrainedWeightsUnusable`.
        """
        ...

    def initial_parameters(self, span: Span) -> Iterator[tuple[str, Tensor]]:
        """Yield the span's trained parameters before the first step, by name in layer order.

        At most one layer is in memory at a time.
        """
        ...

    def load_frozen(self, model: TrainableModel) -> None:
        """Load the values of frozen parameters. Raises `PretrainedWeightsUnusable`, `CheckpointCorrupt`."""
        ...


class BuiltInRunModel:
    """The model of a run of the built-in decoder."""

    def __init__(self, spec: RunSpec, section: ModelSection, vocabulary: int) -> None:
        """Build the shape and the layer table. Raises `UnsupportedModel`."""
        shape = resolve_shape(section, vocabulary)
        self.architecture = BuiltInArchitecture(shape)
        self.table = layer_table(spec, shape)
        self._spec, self._shape, self._seed = spec, shape, spec.run.seed

    def whole_model_bytes(self, samples: int, *, cuda: bool = False) -> int:
        return built_in_memory_bytes(self._spec, self._shape, samples, cuda=cuda)

    def check(self, span: Span | None, on_progress: Callable[[], object] = lambda: None) -> None:
        """Do nothing: the built-in decoder needs no files."""

    def initial_parameters(self, span: Span) -> Iterator[tuple[str, Tensor]]:
        """Yield one parameter at a time.

        Parameters before the span are drawn and dropped, so that a span gets the same values as the whole model.
        """
        for name, values in initial_parameters(self._shape, self._seed):
            if int(name.split(".")[1]) in span:
                yield name, values

    def load_frozen(self, model: TrainableModel) -> None:
        """Do nothing: the built-in decoder has no frozen parameters."""


def run_model(spec: RunSpec, vocabulary: int, base: Path | None = None) -> RunModel:
    """Build the model that a run spec names.

    `vocabulary` is the tokenizer's; `base` is the local directory of the run's pretrained weights. Raises
    `UnsupportedModel`, and `ConfigError` if a library is missing.
    """
    if isinstance(spec.model, HuggingFaceModel):
        from atoll.node.model.hf_run_model import HuggingFaceRunModel  # importing it takes seconds

        return HuggingFaceRunModel(spec, spec.model, vocabulary, base)
    return BuiltInRunModel(spec, spec.model, vocabulary)


def allocate_span(run: RunModel, span: Span, device: torch.device, activation_checkpointing: bool = False) -> SpanModel:
    """Allocate a span's parameters: frozen ones are loaded, trained ones are zero."""
    model = SpanModel(run.architecture.span_definition(span, activation_checkpointing), device)
    run.load_frozen(model)
    return model


def initialise_into(run: RunModel, model: TrainableModel, anchor_E: Tensor) -> None:
    """Write the initial parameters of the model's span into `anchor_E`."""
    views = dict(model.trained_layout.views(anchor_E))
    for name, values in run.initial_parameters(model.span_definition.span):
        views[name].copy_(values)


def write_initial_weights(run: RunModel, path: Path) -> None:
    """Write the initial parameters to a file, for genesis on a node that cannot hold the model.

    All elements are in layer order, fp32 little-endian, bit for bit the values that the order `Initialise` produces. At
    most one layer is in memory at a time. The file is synced to disk on return. Raises `DataDirUnusable`.
    """
    try:
        with path.open("wb") as file:
            for _, values in run.initial_parameters(Span(0, run.architecture.layers - 1)):
                file.write(values.contiguous().numpy().astype("<f4", copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataDirUnusable(
            f"cannot write the initial parameters to {path}: {error.strerror}", "free some space on this disk"
        ) from error
