"""`RunModel` of a Hugging Face decoder: seeded weights, a pretrained base, or LoRA adapters on a frozen base.

Importing this module imports `transformers`, which takes seconds; `run_model.py` does so only for such a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.model_spec import HuggingFaceModel
from atoll.core.run_spec import RunSpec
from atoll.node.model import pretrained_weights
from atoll.node.model.base_files import BaseFiles
from atoll.node.model.hf_configuration import build_configuration, check_lora_targets, lora_configuration
from atoll.node.model.hf_initial_weights import initial_adapter, initialise_layer
from atoll.node.model.hf_layer_table import layer_table
from atoll.node.model.huggingface import HuggingFaceArchitecture, build_architecture
from atoll.node.model.memory_estimate import replica_memory_bytes
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanModel, TrainableModel, layout_of

_CPU = torch.device("cpu")


class HuggingFaceRunModel:
    """The model of a run, built from classes of `transformers` and `peft` alone, whatever the spec contains."""

    def __init__(self, spec: RunSpec, section: HuggingFaceModel, vocabulary: int, base: Path | None) -> None:
        """Build the architecture and its layer table.

        `vocabulary` is the tokenizer's; `base` is the local directory of the pretrained weights. Raises
        `UnsupportedModel`, `ConfigError`, `PretrainedWeightsUnusable`.
        """
        self.architecture = architecture_of(section, vocabulary, spec.data.sequence_length)
        self.table = layer_table(self.architecture, spec.data.sequence_length, spec.model_hash())
        self._spec, self._seed = spec, spec.run.seed
        self._base = BaseFiles(section.base, base) if section.base is not None else None

    def whole_model_bytes(self, samples: int) -> int:
        """Estimate the memory of a trainer of all layers, frozen parameters included."""
        length, section = self._spec.data.sequence_length, self._spec.optimizer
        half_precision, checkpointing = section.precision != "fp32", section.activation_checkpointing
        return replica_memory_bytes(
            self.table, samples * length, length, half_precision=half_precision, checkpointing=checkpointing
        )

    def check(self, span: Span | None, on_progress: Callable[[], object] = lambda: None) -> None:
        """Check all base files if `span` is None; files of a single span are checked when they are read."""
        if self._base is not None and span is None:
            self._base.check_all(on_progress)

    def initial_parameters(self, span: Span) -> Iterator[tuple[str, Tensor]]:
        """Yield initial values, drawn from the run's seed or read from the base."""
        for number in range(span.first, span.last + 1):
            span_definition = self.architecture.span_definition(Span(number, number))
            if self.architecture.has_adapters:
                for slot in layout_of(span_definition).slots:
                    yield slot.name, initial_adapter(slot.name, slot.shape, self._seed)
                continue
            model = SpanModel(span_definition, _CPU)
            if self._base is not None:
                self._read(model)
            else:
                initialise_layer(model, self._seed)
            yield from model.trained.views(model.weights_E)

    def load_frozen(self, model: TrainableModel) -> None:
        """Load the frozen base under adapters."""
        if model.frozen.elements:
            self._read(model)

    def _read(self, model: TrainableModel) -> None:
        assert self._base is not None
        pretrained_weights.load(self.architecture, self._base.directory, model, self._base.check)


def architecture_of(section: HuggingFaceModel, vocabulary: int, sequence_length: int) -> HuggingFaceArchitecture:
    """Build the architecture on the meta device, without allocation. Raises `UnsupportedModel`, `ConfigError`."""
    config = build_configuration(section.config, vocabulary, sequence_length, section.config_nulls)
    adapter = section.adapter
    made = build_architecture(config, lora_configuration(adapter) if adapter is not None else None)
    if adapter is not None:
        check_lora_targets(adapter.targets, made.trained_names)
    return made
