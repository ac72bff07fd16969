"""An exported directory that is evaluated: its files, its origin, and its model in memory.

Only files of that directory are read, and of the base's directory if the export holds adapters. Code that comes with a
model is never run, and weights must be safetensors: other formats are pickles, which can contain code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.core.errors import ConfigError, ModelTooLarge, NotFound, UsageError
from atoll.node.export.huggingface_export import ORIGIN_FILE
from atoll.node.model.base_files import file_sha256
from atoll.node.model.hf_configuration import require_library

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_ORIGIN = {"run": str, "round": int, "manifest": str, "committed_tokens": int}
_REMEDY = "write the directory again with `atoll export`"


@dataclass(frozen=True)
class ExportedModel:
    """A directory in the format of `transformers` or `peft`."""

    directory: Path
    base: Path | None  # the base model's directory; only for adapters
    origin: Mapping[str, object]  # the run and the round of the export; empty if the files do not name them

    @property
    def trained_by_atoll(self) -> bool:
        """Whether Atoll trained the model: then the separator of documents was the only special token in its text."""
        return bool(self.origin)

    def digests(self) -> dict[str, str]:
        """Compute the hex SHA-256 of every file by its name; files of the base begin with `base/`."""
        found = {path.name: file_sha256(path) for path in _files(self.directory)}
        if self.base is not None:
            found |= {f"base/{path.name}": file_sha256(path) for path in _files(self.base)}
        return found


@dataclass(frozen=True)
class LoadedModel:
    """A model of `transformers` or `peft` in evaluation mode, and its tokenizer."""

    model: Any
    tokenizer: Any
    end_token: int | None  # the token that separates documents

    @property
    def dtype(self) -> str:
        """Data type of the weights, such as `float32`."""
        return str(self.model.dtype).removeprefix("torch.")


def open_export(directory: Path, base: Path | None) -> ExportedModel:
    """Check that a directory has a model with its tokenizer, without loading them.

    Raises `NotFound`, `ConfigError`, and `UsageError` if `base` is missing or needless.
    """
    if not directory.is_dir():
        raise NotFound(f"{directory} is not a directory", "name a directory that `atoll export` wrote, or a checkpoint")
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"{directory} has no tokenizer ({' or '.join(_TOKENIZER_FILES)})", _REMEDY)
    if not (directory / _ADAPTER_CONFIG).is_file():
        config = _model_config(directory)
        if base is not None:
            raise UsageError(f"{directory} holds a whole model, so it needs no base", "leave out --base")
        return ExportedModel(directory, None, _origin(config.get("atoll")))
    if base is None:
        raise UsageError(
            f"{directory} holds adapters, which need their base model", "name the directory of the base with --base"
        )
    if not (directory / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{directory} has no adapter_model.safetensors; other formats are not read", _REMEDY)
    _model_config(base)
    return ExportedModel(directory, base, _adapter_origin(directory))


def load(export: ExportedModel, device: torch.device) -> LoadedModel:
    """Load the model, in the data type of its files, and its tokenizer.

    Raises `ConfigError` if the files are damaged or incomplete or need code of their own, and `ModelTooLarge`.
    """
    for library in ("transformers", *(["peft"] if export.base else [])):
        require_library(library)
    try:
        model, tokenizer = _load(export)
        model = model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise ModelTooLarge(
            f"the model does not fit {device}", "export with --dtype bf16, or use --device cpu"
        ) from error
    except Exception as error:  # damaged or malicious files can make these libraries raise any exception
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{export.directory} cannot be loaded: {reason}", _REMEDY) from error
    if len(tokenizer) > (rows := model.get_input_embeddings().weight.shape[0]):
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, but the model only {rows}", _REMEDY)
    end = tokenizer.eos_token_id
    if end is None:  # the byte tokenizer: its end token is also a byte of text, so it must not be declared as special
        end = model.config.eos_token_id
    end = end if isinstance(end, int) else None
    if (
        tokenizer.pad_token is None and end is not None
    ):  # padding is masked anyway; a new token would have no row in the model
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end)
    return LoadedModel(model, tokenizer, end)


def _load(export: ExportedModel) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    model, report = auto.from_pretrained(
        export.base or export.directory,
        dtype="auto",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    wrong = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in report.get(kind, ()))
    if wrong:  # otherwise the library would continue with random weights
        raise ValueError(f"weights are missing or have another shape: {', '.join(wrong[:3])}")
    if export.base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(export.directory), local_files_only=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(export.directory, local_files_only=True, trust_remote_code=False)
    return model, tokenizer


def _model_config(directory: Path) -> dict[str, Any]:
    """Read a whole model's config.json, and check that its weights are safetensors."""
    path = directory / _CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ConfigError(f"cannot read {path}: {reason}", _REMEDY) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object", _REMEDY)
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"{directory} has no safetensors; other formats of weights are not read", _REMEDY)
    return config


def _origin(said: object) -> dict[str, object]:
    """Return the facts on run and round that `atoll export` wrote, if all exist and have the right type."""
    if not isinstance(said, dict) or any(type(said.get(key)) is not kind for key, kind in _ORIGIN.items()):
        return {}
    return {key: said[key] for key in _ORIGIN}


def _adapter_origin(directory: Path) -> dict[str, object]:
    try:
        return _origin(json.loads((directory / ORIGIN_FILE).read_text()))
    except (OSError, ValueError, RecursionError):
        return {}


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())
