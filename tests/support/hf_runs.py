"""Run specs of small Hugging Face decoders, pretrained directories for them to start from, and plain loops of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support.single_process_reference import SingleProcessReference

from atoll.core.clock import SystemClock
from atoll.core.data_position import SampleRange
from atoll.core.model_spec import HuggingFaceModel
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.corpus import load_corpus
from atoll.node.model.base_files import file_sha256
from atoll.node.model.hf_configuration import build_configuration, lora_configuration
from atoll.node.model.run_model import allocate_span, run_model
from atoll.node.model.span import Span
from atoll.node.training.loader import Loader
from atoll.node.training.sample_feed import SampleFeed

WINDOW = 16
_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 8},
    "gpt_neox": _COMMON,
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "qwen3_moe": {
        **_GROUPED,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}
TARGETS = {"gpt_neox": ["query_key_value", "dense_h_to_4h"]}


def text_of(text: str = "a reef is a ring of islands; ") -> str:
    """A corpus of some thousand bytes."""
    return text * 300


def config_of(family: str, **changed: Any) -> dict[str, Any]:
    """As data, two blocks of 32 numbers a token unless something else is said."""
    return {"model_type": family, **CONFIGS[family], **changed}


def model_section(config: dict[str, Any], base: Path | None = None, targets: list[str] | None = None) -> str:
    """The `[model]` section, with every file of `base` pinned."""
    lines = ['[model]\narchitecture = "huggingface"', "[model.config]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    if base is not None:
        lines += ['[model.base]\nname = "tests/tiny"', "[model.base.files]"]
        files = sorted(path for path in base.iterdir() if "safetensors" in path.name)
        lines += [f'"{path.name}" = "{file_sha256(path)}"' for path in files]
    if targets is not None:
        lines += ["[model.adapter]", "rank = 4", "alpha = 8", f"targets = {json.dumps(targets)}"]
    return "\n".join(lines)


def spec_text(model: str, optimizer: str = "learning_rate = 0.01", more: str = "") -> str:
    """A run of samples of `WINDOW` bytes."""
    return (
        f'version = 1\n[run]\nname = "t"\nseed = 5\nstop_tokens = 100000\n{model}\n'
        f'[data]\npath = "overridden"\nsequence_length = {WINDOW}\nvalidation_samples = 8\n'
        f'[optimizer]\nname = "adamw"\n{optimizer}\n'
        f"[sync]\nround_tokens = 1000\n{more}\n"
    )


def spec_of(model: str, optimizer: str = "learning_rate = 0.01") -> RunSpec:
    """The same, read."""
    return parse_run_spec(spec_text(model, optimizer))


def pretrained(directory: Path, family: str = "llama", shard: str = "5GB", **changed: Any) -> Path:
    """A directory that `transformers` wrote, of weights large enough to matter."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    data = config_of(family, **changed)
    torch.manual_seed(11)
    config = CONFIG_MAPPING[data.pop("model_type")](**data)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(directory, max_shard_size=shard)
    return directory


@contextlib.contextmanager
def plain_loop(
    spec_toml: str, text: Path, ranges: tuple[SampleRange, ...], named: dict[str, torch.Tensor]
) -> Iterator[tuple[SingleProcessReference, Loader]]:
    """The same run with nothing of ours but the data."""
    spec = parse_run_spec(spec_toml)
    section = spec.model
    assert isinstance(section, HuggingFaceModel)
    config = build_configuration(section.config, 256, spec.data.sequence_length)
    lora = lora_configuration(section.adapter) if section.adapter is not None else None
    loader = Loader(load_corpus(spec, str(text)), spec.optimizer.micro_batch_samples, SystemClock())
    loader.restart(SampleFeed(ranges))
    try:
        yield SingleProcessReference(config, lora, spec.optimizer, named), loader
    finally:
        loader.close()


def named_of(spec_toml: str, genesis_E: torch.Tensor, base: Path | None = None) -> dict[str, torch.Tensor]:
    """The parameters of a genesis by the names of an unmodified model."""
    run = run_model(parse_run_spec(spec_toml), 256, base)
    model = allocate_span(run, Span(0, run.architecture.layers - 1), torch.device("cpu"))
    model.weights_E.copy_(genesis_E)
    named = {
        name: view.clone()
        for layout, flat_E in ((model.trained_layout, model.weights_E), (model.frozen_layout, model.frozen_E))
        for name, view in layout.views(flat_E)
    }
    tied = model.span_definition.copy
    if tied is not None:
        del named[tied.borrower]
    return named
