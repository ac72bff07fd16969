"""`RunModel` of a Hugging Face decoder: seeded weights, a pretrained base, or LoRA adapters on a frozen base.

Seeded weights of a layer are equal in every span that contains it: each layer is initialised by the family's own rules
with a generator of its own, each adapter with a generator seeded by its name. At genesis one node initialises, and the
other nodes fetch its bytes: torch does not promise equal random sequences on all machines.

Importing this module imports `transformers`, which takes seconds; `run_model.py` does so only for such a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.document_masks import repeated_bytes_per_token
from atoll.core.errors import UnsupportedModel
from atoll.core.model_memory import replica_memory_bytes
from atoll.core.model_spec import HuggingFaceModel
from atoll.core.run_spec import RunSpec
from atoll.node.model import pretrained_weights
from atoll.node.model.base_files import BaseFiles
from atoll.node.model.hf_configuration import build_configuration, check_lora_targets, lora_configuration
from atoll.node.model.hf_layer_table import layer_table
from atoll.node.model.huggingface import HuggingFaceArchitecture, build_architecture
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
        if spec.data.document_masks:
            self.architecture.check_document_masks()
        self.table = layer_table(
            self.architecture,
            spec.data.sequence_length,
            spec.model_hash(),
            repeated_bytes_per_token(spec, *self.architecture.attention_heads),
        )
        self._spec, self._seed = spec, spec.run.seed
        self._base = BaseFiles(section.base, base) if section.base is not None else None

    def whole_model_bytes(self, samples: int, *, cuda: bool = False) -> int:
        """Estimate the memory of a trainer of all layers, frozen parameters included, on any device."""
        return replica_memory_bytes(self.table, self._spec, samples)

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
                    yield slot.name, _initial_adapter(slot.name, slot.shape, self._seed)
                continue
            model = SpanModel(span_definition, _CPU)
            if self._base is not None:
                self._read(model)
            else:
                _initialise_layer(model, self._seed)
            yield from model.trained_layout.views(model.weights_E)

    def load_frozen(self, model: TrainableModel) -> None:
        """Load the frozen base under adapters."""
        if model.frozen_layout.elements:
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


def _initialise_layer(model: SpanModel, seed: int) -> None:
    """Initialise the trained parameters of one layer, on the host.

    Raises `UnsupportedModel` for a matrix for which the family has no rule.
    """
    module = model.span_definition.module
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_seed_from(f"{seed} layer {model.span_definition.span.first}"))
        for part in module.modules():
            module._init_weights(part)  # type: ignore[operator]  # every `PreTrainedModel` has it
    for name, view in model.trained_layout.views(model.weights_E):
        if view.dim() > 1 and not view.any():
            raise UnsupportedModel(
                f"transformers has no rule to initialise {name}", "start from pretrained weights: add [model.base]"
            )


def _initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial values of one factor of an adapter; `name` is its name in the whole model.

    An adapter initially does not change the output: the second factor is zero, the first is uniform within 1/√inputs
    (Hu et al. 2021, arXiv:2106.09685, as in `peft`).
    """
    values = torch.zeros(shape)
    if "lora_A" in name:
        bound = shape[-1] ** -0.5
        values.uniform_(-bound, bound, generator=torch.Generator().manual_seed(_seed_from(f"{seed} {name}")))
    return values


def _seed_from(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
