"""The way out of a Hugging Face decoder: under the names that its family publishes models with.

A run of adapters becomes a directory for `peft`; with its base at hand, a whole model with the adapters merged.
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
from atoll.node.export.safetensors_writer import Form, Part, Shape, stored_part, write
from atoll.node.export.stored_model import StoredModel
from atoll.node.model import pretrained_weights
from atoll.node.model.base_files import BaseFiles
from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.hf_configuration import lora_configuration
from atoll.node.model.hf_layer_table import layer_table
from atoll.node.model.hf_run_model import architecture_of
from atoll.node.model.huggingface import HuggingFace
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanModel, layout_of
from atoll.node.model.tokenizer import Tokenizer
from atoll.node.state.tensor_file import Layers

Publish = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def write_run(
    model: StoredModel,
    section: HuggingFaceModel,
    form: Form,
    tokenizer: Tokenizer,
    facts: Mapping[str, object],
    base: Path | None,
) -> None:
    """Into an empty directory, without the tokenizer.

    Raises `ConfigError` when the checkpoint is of another model than its spec says, `UsageError`, `PretrainedWeightsUnusable`,
    `CheckpointCorrupt`, `OSError`.
    """
    sequence_length = model.spec.data.sequence_length
    architecture = architecture_of(section, tokenizer.vocabulary, sequence_length)
    table = layer_table(architecture, sequence_length, model.spec.model_hash())
    if Layers.of(table) != model.layers:
        raise ConfigError("the checkpoint's layers are not those of the model that its run spec names")
    if base is not None and not architecture.adapted:
        raise UsageError("--base merges adapters into their base; this run trained the whole model")
    layout = layout_of(architecture.cut(Span(0, architecture.layers - 1)))
    if architecture.adapted and base is None:
        _write_adapter(section, model, layout, form)
        return
    empty = _empty_model(architecture)
    if base is not None:
        assert section.base is not None
        borrower = _borrower(architecture, layout)
        empty.config.tie_word_embeddings = borrower is not None
        groups = _merged(architecture, model, layout, BaseFiles(section.base, base), borrower)
    else:
        groups = [
            [stored_part(model, slot, slot.name) for slot in layout.slots if slot.layer == layer]
            for layer in range(architecture.layers)
        ]
    write(form, _published(empty, groups))
    _write_configuration(empty, form, tokenizer, facts)


def _write_adapter(section: HuggingFaceModel, model: StoredModel, layout: FlatLayout, form: Form) -> None:
    """As `peft` loads it on top of the base: the name of the adapter is not part of a tensor's."""
    assert section.adapter is not None
    assert section.base is not None
    config: Any = lora_configuration(section.adapter)
    config.base_model_name_or_path = section.base.name or None
    config.inference_mode = True
    config.save_pretrained(form.directory)
    parts = [
        stored_part(model, slot, f"base_model.model.{slot.name.replace('.default.', '.')}") for slot in layout.slots
    ]
    write(Form(form.directory, form.dtype), parts, "adapter_model")  # peft reads one file


def _borrower(architecture: HuggingFace, layout: FlatLayout) -> str | None:
    """The head's matrix if it is the embedding's; with adapters merged into it, it is not any more."""
    tie, adapters = architecture.tie, f"{architecture.anatomy.head}.lora_"
    return None if tie is None or any(slot.name.startswith(adapters) for slot in layout.slots) else tie.borrower


def _merged(
    architecture: HuggingFace, model: StoredModel, layout: FlatLayout, base: BaseFiles, borrower: str | None
) -> list[list[Part]]:
    """The base's parameters but `borrower`, with what adapters add (Hu et al. 2021, section 4.1), a part a layer."""
    whole = architecture.cut(Span(0, architecture.layers - 1))
    slots = {slot.name: slot for slot in layout.slots}

    def merge(layer: int) -> dict[str, Tensor]:
        from peft.tuners.lora import LoraLayer

        gc.collect()  # modules of the layer before refer to one another in circles
        span = SpanModel(architecture.cut(Span(layer, layer)), torch.device("cpu"))
        pretrained_weights.load(architecture, base.directory, span, base.check)
        for name, view in span.trained.views(span.weights_E):
            view.copy_(model.read(slots[name].offset, slots[name].offset + slots[name].elements).view(view.shape))
        for module in span.cut.module.modules():
            if isinstance(module, LoraLayer):
                module.merge()
        named = dict(span.cut.module.named_parameters())
        return {_plain(name): each.detach() for name, each in named.items() if _is_base(name, borrower)}

    groups = []
    for layer, named in enumerate(whole.parameters):
        shapes = {_plain(name): tuple(each.shape) for name, each in named.items() if _is_base(name, borrower)}
        groups.append([Part(shapes, partial(merge, layer))])
    return groups


def _is_base(name: str, borrower: str | None) -> bool:
    return "lora_" not in name and _plain(name) != borrower


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _empty_model(architecture: HuggingFace) -> Any:
    """Of the family's class, on the meta device, with a configuration of its own."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(deepcopy(architecture.config), dtype=torch.float32, trust_remote_code=False)


def _published(empty: Any, groups: Iterable[list[Part]]) -> list[Part]:
    """Parts with the tensors that the family publishes; `groups` are those of a layer each.

    Experts that lie in one tensor here lie one by one there: `transformers` itself takes them apart. A parameter at a
    time where that is possible, else a layer.
    """
    from transformers.core_model_loading import revert_weight_conversion

    def publish(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(empty, tensors))

    groups, found, announced = list(groups), list[Part](), dict[str, Shape]()
    for parts in groups:
        single, together = [_converted(part, publish) for part in parts], _converted(_together(parts), publish)
        apart = {name: shape for part in single for name, shape in part.shapes.items()}
        found += single if apart == together.shapes else [together]
        announced |= together.shapes
    if announced != _converted(_together([part for parts in groups for part in parts]), publish).shapes:
        raise UnsupportedModel(
            f"{empty.config.model_type} publishes tensors that are made of several layers",
            "train it, and keep its checkpoints: this version cannot export it",
        )
    return found


def _together(parts: list[Part]) -> Part:
    def make() -> dict[str, Tensor]:
        return {name: tensor for part in parts for name, tensor in part.make().items()}

    return Part({name: shape for part in parts for name, shape in part.shapes.items()}, make)


def _converted(part: Part, publish: Publish) -> Part:
    """Its shapes are found on the meta device."""

    def make() -> dict[str, Tensor]:
        return publish(part.make())

    with torch.device("meta"):
        empty = {name: torch.empty(shape) for name, shape in part.shapes.items()}
    return Part(_shapes(publish(empty)), make)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(each.shape) for name, each in tensors.items()}


def _write_configuration(empty: Any, form: Form, tokenizer: Tokenizer, facts: Mapping[str, object]) -> None:
    """The files beside the weights, as `save_pretrained` of a whole model leaves them."""
    end = tokenizer.separator[0] if tokenizer.separator else None
    for holder in (empty.config, empty.generation_config):
        holder.bos_token_id, holder.eos_token_id, holder.pad_token_id = None, end, None
    config = empty.config
    config.use_cache, config.atoll = True, dict(facts)
    config.dtype, config.architectures = str(form.dtype).removeprefix("torch."), [type(empty).__name__]
    config.save_pretrained(form.directory)
    empty.generation_config.save_pretrained(form.directory)
