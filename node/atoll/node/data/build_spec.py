"""The build spec: which text becomes which corpus, as TOML, parsed into frozen models. Unknown keys are errors.

A source has the same keys as `[data]` of a run spec. Relative paths are relative to the spec's file.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from atoll.core.errors import BuildSpecError
from atoll.core.model_spec import Section
from atoll.node.data.blocks import MAX_SHARD_BYTES
from atoll.node.data.card import MAX_SOURCES, SOURCE_NAME, TOKENIZER_DIRECTORY
from atoll.node.data.chat_template import MAX_TEMPLATE_BYTES

_REMEDY = "docs/guide/data.md lists every key of a build spec"


SHARD_STEP_BYTES = 1 << 20  # a multiple of a chunk


class BuildSource(Section):
    """A named part of the corpus: where its text is.

    It has the keys of `[data]` in a run spec, and keys for answers.
    """

    name: str
    source: Literal["text", "jsonl", "parquet", "huggingface"] = "text"
    path: str
    field: str = "text"
    subset: str | None = None
    split: str = "train"
    messages: Annotated[str, Field(min_length=1)] | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    completion: Annotated[str, Field(min_length=1)] | None = None

    @property
    def has_answers(self) -> bool:
        """True for conversations, and for prompts with completions."""
        return self.messages is not None or self.prompt is not None

    @model_validator(mode="after")
    def _one_kind(self) -> BuildSource:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt and completion come together")
        if self.messages is not None and self.prompt is not None:
            raise ValueError("a source has messages, or prompt and completion, not both")
        if self.has_answers and self.source == "text":
            raise ValueError("messages, prompt and completion need the source jsonl, parquet or huggingface")
        if self.has_answers and "field" in self.model_fields_set:
            raise ValueError("field is for plain text: leave it out beside messages, prompt and completion")
        return self

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not SOURCE_NAME.fullmatch(value) or value == TOKENIZER_DIRECTORY:
            raise ValueError(
                f"{value[:80]!r} cannot be the name of a source: use at most 64 of a-z, 0-9, _ and -, "
                f"begin with a letter or digit, and do not use {TOKENIZER_DIRECTORY!r}"
            )
        return value


class BuildSpec(Section):
    """A whole build spec file."""

    tokenizer: str = "bytes"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    shard_bytes: Annotated[int, Field(ge=SHARD_STEP_BYTES, le=MAX_SHARD_BYTES)] = 64 << 20
    order: Literal["shuffled", "input"] = "shuffled"
    chat_template: str | None = None  # a file
    longest_example: Annotated[int, Field(ge=2, lt=2**31)] | None = None
    long_examples: Literal["leave-out", "cut"] = "leave-out"
    sources: tuple[BuildSource, ...]

    @property
    def has_answers(self) -> bool:
        """True if any source has answers: then some tokens of the corpus are input only."""
        return any(source.has_answers for source in self.sources)

    @model_validator(mode="after")
    def _keys_of_answers(self) -> BuildSpec:
        if self.chat_template is not None and all(source.messages is None for source in self.sources):
            raise ValueError("chat_template needs a source with messages")
        if self.longest_example is not None and not self.has_answers:
            raise ValueError("longest_example needs a source with messages, or with prompt and completion")
        if self.longest_example is None and self.long_examples == "cut":
            raise ValueError("long_examples needs longest_example")
        return self

    @field_validator("shard_bytes")
    @classmethod
    def _whole_chunks(cls, value: int) -> int:
        if value % SHARD_STEP_BYTES:
            raise ValueError(f"must be a multiple of {SHARD_STEP_BYTES:,} (1 MiB)")
        return value

    @model_validator(mode="after")
    def _different_names(self) -> BuildSpec:
        names = [source.name for source in self.sources]
        if not 1 <= len(names) <= MAX_SOURCES:
            raise ValueError(f"a corpus has 1 to {MAX_SOURCES} sources, and [[sources]] names {len(names)}")
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"two sources have the name {twice!r}")
        return self


def parse_build_spec(text: str, where: str, directory: Path) -> BuildSpec:
    """Parse and check TOML text; relative paths in it are relative to `directory`. Raises `BuildSpecError`."""
    try:
        spec = BuildSpec.model_validate(tomllib.loads(text))
    except ValidationError as error:
        problems = [_problem(item["loc"], item["msg"], item["type"]) for item in error.errors()]
        told = f"{where}: {problems[0]}" if len(problems) == 1 else "\n  ".join((f"{where}:", *problems))
        raise BuildSpecError(told, _REMEDY) from error
    except (ValueError, RecursionError) as error:
        raise BuildSpecError(f"{where} is not TOML: {error}", _REMEDY) from error
    sources = tuple(
        source
        if source.source == "huggingface"
        else source.model_copy(update={"path": _resolved(source.path, directory)})
        for source in spec.sources
    )
    tokenizer = _resolved(spec.tokenizer, directory) if spec.tokenizer.startswith((".", "~")) else spec.tokenizer
    template = _resolved(spec.chat_template, directory) if spec.chat_template is not None else None
    return spec.model_copy(update={"sources": sources, "tokenizer": tokenizer, "chat_template": template})


def spec_of_one_source(path: str, values: Mapping[str, object]) -> BuildSpec:
    """Return a spec with one source from command-line options. Raises `BuildSpecError`."""
    of_source = {key: value for key, value in values.items() if key in BuildSource.model_fields}
    others = {key: value for key, value in values.items() if key not in of_source}
    try:
        return BuildSpec.model_validate({**others, "sources": [{"name": "text", **of_source, "path": path}]})
    except ValidationError as error:
        first = error.errors()[0]
        raise BuildSpecError(f"--{_problem(first['loc'][-1:], first['msg'], first['type'])}", "see --help") from error


def read_chat_template(path: str) -> str:
    """Read the file that `chat_template` names. Raises `BuildSpecError`."""
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise BuildSpecError(f"cannot read {path}: {error.strerror or error}", "check chat_template") from error
    except UnicodeDecodeError as error:
        raise BuildSpecError(f"{path} is no chat template: it is not UTF-8", "check chat_template") from error
    if len(data) > MAX_TEMPLATE_BYTES:
        raise BuildSpecError(f"{path} is no chat template: it is larger than 1 MiB", "check chat_template")
    return text


def read_build_spec(path: Path) -> BuildSpec:
    """Read a build spec from its file. Raises `BuildSpecError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BuildSpecError(f"cannot read {path}: {error.strerror or error}", "check the path") from error
    except UnicodeDecodeError as error:
        raise BuildSpecError(f"{path} is not TOML: it is not UTF-8", _REMEDY) from error
    return parse_build_spec(text, path.name, path.resolve().parent)


def _resolved(path: str, directory: Path) -> str:
    return str(directory / Path(path).expanduser())


def _problem(location: tuple[int | str, ...], message: str, kind: str) -> str:
    name = ".".join(f"{part + 1}" if isinstance(part, int) else part for part in location)
    if kind == "extra_forbidden":
        leaf = str(location[-1])
        guesses = difflib.get_close_matches(leaf, set(_keys(BuildSpec)) | set(_keys(BuildSource)), 1, 0.8)
        return f"unknown key {name}{f' (did you mean {guesses[0]}?)' if guesses else ''}"
    if kind == "missing":
        return f"{name} is missing"
    plain = message.removeprefix("Value error, ")
    return f"{name}: {plain}" if name else plain


def _keys(section: type[BaseModel]) -> Iterator[str]:
    yield from section.model_fields
