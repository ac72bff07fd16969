"""The way out of a Hugging Face decoder: by `transformers` and `peft` themselves, in the form they publish models in.

A run of adapters becomes a directory for `peft`; with its base at hand, a whole model with the adapters merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.core.errors import ConfigError, UsageError
from atoll.core.model_spec import HuggingFaceModel
from atoll.node.pipeline import weights
from atoll.node.pipeline.base_files import BaseFiles
from atoll.node.pipeline.configuration import lora_configuration
from atoll.node.pipeline.huggingface import HuggingFace
from atoll.node.pipeline.span import Span
from atoll.node.pipeline.span_model import SpanModel, layout_of
from atoll.node.pipeline.table import layer_table
from atoll.node.state.checkpoint import Checkpoint
from atoll.node.state.tensor_file import Layers
from atoll.node.training.huggingface_run import architecture_of
from atoll.node.training.tokenizer import Tokenizer


def write_run(
    checkpoint: Checkpoint,
    section: HuggingFaceModel,
    directory: Path,
    dtype: torch.dtype,
    tokenizer: Tokenizer,
    facts: Mapping[str, object],
    base: Path | None,
) -> None:
    """Into an empty directory, without the tokenizer.

    Raises `ConfigError` when the checkpoint is of another model than its spec says, `UsageError`, `BaseUnusable`.
    """
    sequence_length = checkpoint.spec.data.sequence_length
    architecture = architecture_of(section, tokenizer.vocabulary, sequence_length)
    table = layer_table(architecture, sequence_length, checkpoint.spec.model_hash())
    if Layers.of(table) != checkpoint.layers:
        raise ConfigError("the checkpoint's layers are not those of the model that its run spec names")
    if base is not None and not architecture.adapted:
        raise UsageError("--base merges adapters into their base; this run trained the whole model")
    cut = architecture.cut(Span(0, architecture.layers - 1))
    named = dict(layout_of(cut).views(checkpoint.anchor_E))
    if architecture.adapted and base is None:
        _write_adapter(section, named, directory, dtype)
        return
    if base is not None:
        assert section.base is not None
        named = _merged(architecture, SpanModel(cut, torch.device("cpu")), BaseFiles(section.base, base), named)
    _write_model(architecture, named, directory, dtype, tokenizer, facts)


def _write_adapter(section: HuggingFaceModel, named: Mapping[str, Tensor], directory: Path, dtype: torch.dtype) -> None:
    """As `peft` loads it on top of the base: the name of the adapter is not part of a tensor's."""
    assert section.adapter is not None
    assert section.base is not None
    config: Any = lora_configuration(section.adapter)
    config.base_model_name_or_path = section.base.name or None
    config.inference_mode = True
    config.save_pretrained(directory)
    plain = {f"base_model.model.{name.replace('.default.', '.')}": each for name, each in named.items()}
    values = {name: each.to(dtype).contiguous() for name, each in plain.items()}
    save_file(values, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _merged(
    architecture: HuggingFace, model: SpanModel, base: BaseFiles, adapters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The base's parameters with what the adapters add (Hu et al. 2021, section 4.1)."""
    from peft.tuners.lora import LoraLayer

    weights.load(architecture, base.directory, model, base.check)
    for name, view in model.trained.views(model.weights_E):
        view.copy_(adapters[name])
    for module in model.cut.module.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    named = model.cut.module.named_parameters()
    merged = {name.replace(".base_layer.", "."): each.detach() for name, each in named if "lora_" not in name}
    if architecture.tie is not None:
        del merged[architecture.tie.borrower]
    return merged


def _write_model(
    architecture: HuggingFace,
    named: Mapping[str, Tensor],
    directory: Path,
    dtype: torch.dtype,
    tokenizer: Tokenizer,
    facts: Mapping[str, object],
) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config: Any = architecture.config
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.load_state_dict({name: each.to(dtype) for name, each in named.items()}, strict=False, assign=True)
    model.tie_weights()
    end = tokenizer.separator[0] if tokenizer.separator else None
    for holder in (model.config, model.generation_config):
        holder.bos_token_id, holder.eos_token_id, holder.pad_token_id = None, end, None
    model.config.use_cache, model.config.dtype, model.config.atoll = True, dtype, dict(facts)
    model.save_pretrained(directory)
