"""The `[model]` section of a run spec: the built-in decoder, or the configuration of a Hugging Face model.

A configuration is untrusted data. These checks need no library: form, size, and that it names no code and nothing to
fetch. Nodes check whether `transformers` knows its keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

MAX_COUNT = 2**53  # exact in JSON and as a double

Positive = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Rate = Annotated[float, Field(gt=0, le=10)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME = (
    "model.safetensors",
    "model.safetensors.index.json",
)  # a base has one of the two

MAX_CONFIG_BYTES = 64 << 10
MAX_CONFIG_DEPTH = 3
MAX_CONFIG_INTEGER = 2**24  # above every known size or window, but small enough to allocate a vector
MAX_CONFIG_LAYERS = 1022  # blocks; with embedding and head the planner's limit of layers
MAX_CONFIG_EXPERTS = 4096  # parts of a block, such as experts
MAX_BASE_FILES = 1024

_KEY = re.compile(r"^[a-z][A-Za-z0-9_]{0,79}$")
_TEXT = re.compile(r"[A-Za-z0-9_.+-]{0,80}")  # names of functions and kinds; no paths or repositories
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FORBIDDEN_KEY_PARTS = (
    "auto_map",
    "trust_remote_code",
    "name_or_path",
    "implementation",
    "quantization",
    "custom_pipelines",
)


_Keys = Annotated[tuple[Annotated[str, Field(pattern=_KEY.pattern)], ...], Field(max_length=64)]


class Section(BaseModel):
    """A table of a run spec: frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class ModelSection(Section):
    """A Llama-compatible decoder: a preset, any of whose numbers can be replaced."""

    architecture: Literal["built-in"] = "built-in"
    preset: Literal["nano", "micro", "30m", "125m", "350m", "1b", "3b", "7b"] = "nano"
    vocabulary: Positive | None = None  # default: the tokenizer's size
    dimension: Positive | None = None
    layers: Positive | None = None
    heads: Positive | None = None
    kv_heads: Positive | None = None
    hidden_dimension: Positive | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    tie_embeddings: bool | None = None


class BaseSection(Section):
    """Pretrained weights. Every member has the same files on its disk, bit for bit."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9 ._/-]{0,200}$")] = (
        ""  # for people, and for programs that load an exported adapter
    )
    files: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]  # name → hex SHA-256

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, str]) -> dict[str, str]:
        if not 1 <= len(files) <= MAX_BASE_FILES:
            raise ValueError(f"must name 1 to {MAX_BASE_FILES} files")
        for name in files:
            if not _FILE.fullmatch(name) or not (name.endswith(".safetensors") or name == SAFE_WEIGHTS_INDEX_NAME):
                raise ValueError(f"{name!r} is not the name of a .safetensors file or {SAFE_WEIGHTS_INDEX_NAME}")
        if (SAFE_WEIGHTS_NAME in files) == (SAFE_WEIGHTS_INDEX_NAME in files):
            raise ValueError(
                f"must have either {SAFE_WEIGHTS_NAME}, or {SAFE_WEIGHTS_INDEX_NAME} and the files that it lists"
            )
        return files

    def __hash__(self) -> int:
        return hash((self.name, *sorted(self.files.items())))


class AdapterSection(Section):
    """LoRA (Hu et al. 2021, arXiv:2106.09685): trains two low-rank matrices per target; the base is frozen."""

    kind: Literal["lora"] = "lora"
    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    alpha: Annotated[float, Field(gt=0, le=65536)] = 16.0
    targets: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.]{0,199}$")], ...],
        Field(min_length=1, max_length=64),
    ]  # module names, or their last parts


class HuggingFaceModel(Section):
    """A `transformers` decoder, given by its configuration; starts from seeded weights or a pretrained base."""

    architecture: Literal["huggingface"]
    config: dict[str, Any]  # as in a config.json; `model_type` names the family
    config_nulls: _Keys = ()  # keys whose value is null but whose default is not: TOML has no null
    base: BaseSection | None = None
    adapter: AdapterSection | None = None

    @field_validator("config")
    @classmethod
    def _plain_data(cls, config: dict[str, Any]) -> dict[str, Any]:
        _check_table(config, 1)
        if len(json.dumps(config)) > MAX_CONFIG_BYTES:
            raise ValueError(f"must be at most {MAX_CONFIG_BYTES} bytes as JSON")
        if not isinstance(config.get("model_type"), str) or not config["model_type"]:
            raise ValueError('needs model_type, such as "llama"')
        return config

    @model_validator(mode="after")
    def _check_base_and_adapter(self) -> HuggingFaceModel:
        if self.adapter is not None and self.base is None:
            raise ValueError("an adapter needs pretrained weights: add [model.base], as `atoll base DIR` prints it")
        if twice := sorted(set(self.config_nulls) & set(self.config)):
            raise ValueError(f"{twice[0]} is set in config and also listed in config_nulls; remove one")
        if self.base is not None and "vocab_size" not in self.config:
            raise ValueError("config must set vocab_size if there is a base")
        return self

    def __hash__(self) -> int:
        return hash(json.dumps(self.model_dump(mode="json"), sort_keys=True))


def _kind_of(value: Any) -> str | None:
    """Return the section's `architecture`; the default is the built-in one."""
    if isinstance(value, Mapping):
        return str(value.get("architecture", "built-in"))
    return getattr(value, "architecture", None)


ARCHITECTURES = ("built-in", "huggingface")

AnyModel = Annotated[
    Annotated[ModelSection, Tag("built-in")] | Annotated[HuggingFaceModel, Tag("huggingface")],
    Discriminator(
        _kind_of,
        custom_error_type="unknown_architecture",
        custom_error_message='architecture must be "built-in" or "huggingface"',
    ),
]


def _check_table(table: Mapping[Any, Any], depth: int) -> None:
    """Raise `ValueError` unless the table is small plain data that names nothing to fetch or run."""
    if depth > MAX_CONFIG_DEPTH:
        raise ValueError(f"tables are nested {depth} deep; at most {MAX_CONFIG_DEPTH}")
    for key, value in table.items():
        if any(word in str(key) for word in _FORBIDDEN_KEY_PARTS):
            raise ValueError(f"{key} names code or weights outside the run: remove it")
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(
                f"{key!r} is not a valid key: a-z first, then letters, digits and _, at most 80 characters"
            )
        if isinstance(value, Mapping):
            _check_table(value, depth + 1)
        else:
            for item in value if isinstance(value, list) else [value]:
                _check_value(key, item)


def _check_value(key: str, value: object) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        parts = "expert" in key or "block" in key
        most = MAX_CONFIG_LAYERS if "layer" in key else MAX_CONFIG_EXPERTS if parts else MAX_CONFIG_INTEGER
        if abs(value) > most:
            raise ValueError(f"{key} = {value} is out of range; its magnitude is at most {most}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{key} must be finite")
    elif not isinstance(value, str) or not _TEXT.fullmatch(value):
        raise ValueError(f"{key} must be a number, true, false, or a short name without slashes")
