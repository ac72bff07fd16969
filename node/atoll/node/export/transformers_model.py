"""Export of a Hugging Face decoder under the names that its family publishes models with.

A run of adapters becomes a directory for `peft`; with its base, it becomes a whole model with the adapters merged.
`huggingface_export.py` calls `write_huggingface_model` and writes the tokenizer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import ConfigError, UnsupportedModel, UsageError
from atoll.core.model_spec import HuggingFaceModel
from atoll.node.export.safetensors_writer import OutputFormat, Shape, TensorGroup, stored_tensor_group, write
from atoll.node.export.stored_model import StoredModel
from atoll.node.model import pretrained_weights
from atoll.node.model.base_files import BaseFiles
from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.hf_configuration import lora_configuration
from atoll.node.model.hf_layer_table import layer_table
from atoll.node.model.hf_run_model import architecture_of
from atoll.node.model.huggingface import HuggingFaceArchitecture
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanModel, layout_of
from atoll.node.model.tokenizer import Tokenizer
from atoll.node.state.tensor_file import LayerLayout

ConvertTensors = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def write_huggingface_model(
    model: StoredModel,
    section: HuggingFaceModel,
    output_format: OutputFormat,
    tokenizer: Tokenizer,
    facts: Mapping[str, object],
    base: Path | None,
) -> None:
    """Write all files except the tokenizer's into an empty directory.

    `facts`: provenance, for config.json. Raises `ConfigError` if the checkpoint does not match its run spec,
    `UsageError`, `PretrainedWeightsUnusable`, `CheckpointCorrupt`, `OSError`.
    """
    sequence_length = model.spec.data.sequence_length
    architecture = architecture_of(section, tokenizer.vocabulary, sequence_length)
    table = layer_table(architecture, sequence_length, model.spec.model_hash())
    if LayerLayout.of(table) != model.layers:
        raise ConfigError("the checkpoint's layers do not match the [model] of its run spec", "use another checkpoint")
    if base is not None and not architecture.has_adapters:
        raise UsageError("this run trained the whole model, so there are no adapters to merge", "leave out --base")
    layout = layout_of(architecture.span_definition(Span(0, architecture.layers - 1)))
    if architecture.has_adapters and base is None:
        _write_adapter(section, model, layout, output_format)
        return
    empty = _meta_model(architecture)
    if base is not None:
        assert section.base is not None
        borrower = _tied_head_name(architecture, layout)
        empty.config.tie_word_embeddings = borrower is not None
        groups = _merged_groups(architecture, model, layout, BaseFiles(section.base, base), borrower)
    else:
        groups = [
            [stored_tensor_group(model, slot, slot.name) for slot in layout.slots if slot.layer == layer]
            for layer in range(architecture.layers)
        ]
    write(output_format, _published_groups(empty, groups))
    _write_configuration(empty, output_format, tokenizer, facts)


def _write_adapter(
    section: HuggingFaceModel, model: StoredModel, layout: FlatLayout, output_format: OutputFormat
) -> None:
    """Write adapters in the form that `peft` loads: tensor names without the adapter's name."""
    assert section.adapter is not None
    assert section.base is not None
    config: Any = lora_configuration(section.adapter)
    config.base_model_name_or_path = section.base.name or None
    config.inference_mode = True
    config.save_pretrained(output_format.directory)
    tensor_groups = [
        stored_tensor_group(model, slot, f"base_model.model.{slot.name.replace('.default.', '.')}")
        for slot in layout.slots
    ]
    one_file = OutputFormat(output_format.directory, output_format.dtype)  # peft does not read shards
    write(one_file, tensor_groups, "adapter_model")


def _tied_head_name(architecture: HuggingFaceArchitecture, layout: FlatLayout) -> str | None:
    """Return the name of the head's matrix if it is tied to the embedding, else None.

    It is no longer tied if adapters are merged into it.
    """
    tie, adapters = architecture.tie, f"{architecture.module_paths.head}.lora_"
    return None if tie is None or any(slot.name.startswith(adapters) for slot in layout.slots) else tie.borrower


def _merged_groups(
    architecture: HuggingFaceArchitecture, model: StoredModel, layout: FlatLayout, base: BaseFiles, borrower: str | None
) -> list[list[TensorGroup]]:
    """Return the base's parameters, except `borrower`, with the adapters merged, by layer.

    The merge is that of Hu et al. 2021, section 4.1. Each layer is one group.
    """
    whole = architecture.span_definition(Span(0, architecture.layers - 1))
    slots = {slot.name: slot for slot in layout.slots}

    def merge(layer: int) -> dict[str, Tensor]:
        from peft.tuners.lora import LoraLayer

        gc.collect()  # modules of the previous layer refer to each other in cycles
        span = SpanModel(architecture.span_definition(Span(layer, layer)), torch.device("cpu"))
        pretrained_weights.load(architecture, base.directory, span, base.check)
        for name, view in span.trained_layout.views(span.weights_E):
            view.copy_(model.read(slots[name].offset, slots[name].offset + slots[name].elements).view(view.shape))
        for module in span.span_definition.module.modules():
            if isinstance(module, LoraLayer):
                module.merge()
        named = dict(span.span_definition.module.named_parameters())
        return {name: values.detach() for name, values in _base_parameters(named, borrower).items()}

    return [
        [TensorGroup(_shapes(_base_parameters(named, borrower)), partial(merge, layer))]
        for layer, named in enumerate(whole.parameters)
    ]


def _base_parameters(named: Mapping[str, Tensor], borrower: str | None) -> dict[str, Tensor]:
    """Select the parameters of the base, except `borrower`, under their names in the base."""
    base = {name.replace(".base_layer.", "."): values for name, values in named.items() if "lora_" not in name}
    return {name: values for name, values in base.items() if name != borrower}


def _meta_model(architecture: HuggingFaceArchitecture) -> Any:
    """Build a model of the family's class on the meta device, with its own copy of the configuration."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(deepcopy(architecture.config), dtype=torch.float32, trust_remote_code=False)


def _published_groups(empty: Any, groups: Iterable[list[TensorGroup]]) -> list[TensorGroup]:
    """Convert groups, listed by layer, to the tensors that the family publishes.

    A published model may have a tensor per expert where the trained model has one tensor for all experts.
    `transformers` splits them. The result has one group per parameter where that is possible, else one per layer.
    """
    from transformers.core_model_loading import revert_weight_conversion

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(empty, tensors))

    groups, found, announced = list(groups), list[TensorGroup](), dict[str, Shape]()
    for layer_groups in groups:
        single = [_convert_group(group, convert) for group in layer_groups]
        combined = _convert_group(_combine_groups(layer_groups), convert)
        single_shapes = {name: shape for group in single for name, shape in group.shapes.items()}
        found += single if single_shapes == combined.shapes else [combined]
        announced |= combined.shapes
    whole = _combine_groups([group for layer_groups in groups for group in layer_groups])
    if announced != _convert_group(whole, convert).shapes:
        raise UnsupportedModel(
            f"{empty.config.model_type} publishes tensors that contain several layers",
            "keep the checkpoints: this version cannot export this family",
        )
    return found


def _combine_groups(tensor_groups: list[TensorGroup]) -> TensorGroup:
    def make() -> dict[str, Tensor]:
        return {name: tensor for group in tensor_groups for name, tensor in group.make().items()}

    return TensorGroup({name: shape for group in tensor_groups for name, shape in group.shapes.items()}, make)


def _convert_group(group: TensorGroup, convert: ConvertTensors) -> TensorGroup:
    """Convert a group's tensors; the new shapes are found on the meta device."""

    def make() -> dict[str, Tensor]:
        return convert(group.make())

    with torch.device("meta"):
        empty = {name: torch.empty(shape) for name, shape in group.shapes.items()}
    return TensorGroup(_shapes(convert(empty)), make)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(each.shape) for name, each in tensors.items()}


def _write_configuration(
    empty: Any, output_format: OutputFormat, tokenizer: Tokenizer, facts: Mapping[str, object]
) -> None:
    """Write the configuration files next to the weights, as `save_pretrained` of a whole model does."""
    end = tokenizer.separator[0] if tokenizer.separator else None
    for holder in (empty.config, empty.generation_config):
        holder.bos_token_id, holder.eos_token_id, holder.pad_token_id = None, end, None
    config = empty.config
    config.use_cache, config.atoll = True, dict(facts)
    config.dtype, config.architectures = str(output_format.dtype).removeprefix("torch."), [type(empty).__name__]
    config.save_pretrained(output_format.directory)
    empty.generation_config.save_pretrained(output_format.directory)
