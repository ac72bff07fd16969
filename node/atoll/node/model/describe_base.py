"""The `[model]` section of a run spec, written for a local directory of pretrained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll.core.errors import UnsupportedModel
from atoll.core.model_spec import SAFE_WEIGHTS_INDEX_NAME, BaseSection, HuggingFaceModel
from atoll.core.run_spec import toml_table
from atoll.node.model.base_files import file_sha256
from atoll.node.model.hf_configuration import NON_MODEL_KEYS, build_configuration, known_keys, require_library
from atoll.node.model.huggingface import build_architecture, read_configuration
from atoll.node.model.pretrained_weights import tensor_files

# these keys do not change the model
_TOKENS = {"bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"}


def describe(directory: Path, name: str) -> tuple[str, list[str]]:
    """Write the `[model]` section, and notes for the operator.

    Raises `ConfigError`, `UnsupportedModel`, `CheckpointCorrupt`, `PretrainedWeightsUnusable`.
    """
    require_library("transformers")
    config, notes = read_configuration(directory), []
    for key in sorted(vars(config)):
        if any(word in key for word in ("dropout", "jitter")) and getattr(config, key):
            setattr(config, key, 0.0)
            notes.append(f"{key} is set to 0: backward computes a span again and must get the same result")
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
        notes.append("output_router_logits is set to false: experts are trained without a balancing loss")
    build_architecture(config)
    data, default = _data(config), type(config)()
    nulls = [key for key, value in data.items() if value is None and getattr(default, key, None) is not None]
    strange = set(vars(config)) - set(vars(default)) - known_keys(type(config)) - NON_MODEL_KEYS - _TOKENS
    if strange := {key for key in strange if not key.startswith("_")}:
        notes.append(f"left out, because {config.model_type} has no such keys: {', '.join(sorted(strange))}")
    index = {SAFE_WEIGHTS_INDEX_NAME} if (directory / SAFE_WEIGHTS_INDEX_NAME).exists() else set()
    files = {file: file_sha256(directory / file) for file in sorted(index | set(tensor_files(directory).values()))}
    try:
        base = BaseSection(name=name, files=files)
        told = {key: value for key, value in data.items() if value is not None}
        section = HuggingFaceModel(architecture="huggingface", config=told, config_nulls=tuple(nulls), base=base)
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise UnsupportedModel(f"{directory} cannot be written as a run spec: {reasons}") from error
    _check_complete(section, config)
    return "\n".join(toml_table("model", dict(section))).strip(), notes


def _data(config: Any) -> dict[str, Any]:
    """Return the keys that define the model, with all defaults, which may differ in other library versions."""
    keys = known_keys(type(config)) - _TOKENS
    return {key: _without_nothing(value) for key, value in config.to_dict().items() if key in keys}


def _check_complete(section: HuggingFaceModel, config: Any) -> None:
    """Check that the section builds the same model again. Raises `UnsupportedModel`."""
    again, said = build_configuration(section.config, 1, 1, section.config_nulls).to_dict(), config.to_dict()
    lost = sorted(key for key in known_keys(type(config)) - _TOKENS if again.get(key) != said.get(key))
    if lost:
        raise UnsupportedModel(f"{config.model_type} cannot be written as a run spec: {', '.join(lost)} would be lost")


def _without_nothing(value: Any) -> Any:
    """Remove nulls from tables, because TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_nothing(each) for key, each in value.items() if each is not None}
    return value
