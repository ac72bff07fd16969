"""The run spec: one training job as TOML, parsed into frozen models. Unknown keys are errors.

A spec contains names of architectures that Atoll knows, and numbers. It cannot name code. The coordinator stores it,
every node validates it again, and `RunSpec.resolved_toml` writes it with all defaults.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from atoll.core.errors import RunSpecError, UsageError
from atoll.core.model_spec import ARCHITECTURES, AnyModel, Count, Fraction, ModelSection, Positive, Rate, Section
from atoll.core.recipe import Recipe, recipe_for
from atoll.core.toml_text import toml_value

SPEC_VERSION = 1

MAX_ROUND_SECONDS = 86400
BY_RECIPE = -1.0  # marks a number that the spec does not set; `RunSpec` takes it from `core/recipe.py`

_BARE = re.compile(r"[A-Za-z0-9_-]+")  # keys that need no quotes in TOML


RunName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


class RunSection(Section):
    """Name and length of the run."""

    name: RunName  # also the run id
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    min_nodes: Annotated[int, Field(ge=1, le=1024)] = 1  # nodes that must be ready before genesis
    stop_tokens: Positive  # the run finishes at this many committed tokens


NotNegative = Annotated[float, Field(ge=0)]


class MixtureSection(Section):
    """A stage of a mixture: the weights of a corpus's sources from a number of committed tokens on."""

    from_tokens: Count = 0  # committed tokens of the run; the first stage begins at 0
    weights: dict[str, NotNegative] | None = None  # share of each source; 0 for sources that are not named
    # alternative to weights: passes over each source, all in the same time
    epochs: dict[str, NotNegative] | None = None

    @model_validator(mode="after")
    def _check(self) -> MixtureSection:
        if bool(self.weights) == bool(self.epochs):
            raise ValueError("a stage needs either weights or epochs")
        if not any((self.weights or self.epochs or {}).values()):
            raise ValueError("a stage needs a source with a weight above 0")
        return self

    def __hash__(self) -> int:
        return hash((self.from_tokens, *sorted((self.weights or self.epochs or {}).items())))


class DataSection(Section):
    """Where the corpus is, and its division into samples of `sequence_length` tokens."""

    source: Literal["text", "jsonl", "parquet", "huggingface", "npy", "megatron", "corpus"] = "text"
    path: str = ""  # file, directory or glob on each node; for huggingface a data set's name or path, or `join --data`
    corpus: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # for corpus: digest of the corpus card
    mirrors: Annotated[
        tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=32)
    ] = ()  # for corpus: https://…, s3://…, hf://…, directories
    mixture: Annotated[tuple[MixtureSection, ...], Field(max_length=64)] = ()  # for corpus; default: sources by size
    field: str = "text"  # column or JSON key of the text
    subset: str | None = None  # huggingface configuration name
    split: str = "train"
    tokenizer: str = "bytes"  # or a Hugging Face tokenizer's name or path
    sequence_length: Annotated[int, Field(ge=8, le=1 << 20)] = 128
    validation_samples: Annotated[int, Field(ge=1, le=65536)] = 64  # taken from the end of the corpus, never trained
    document_masks: bool = False  # tokens attend only within their document; positions restart in each

    @model_validator(mode="after")
    def _check_source(self) -> DataSection:
        if self.source != "corpus":
            if "path" not in self.model_fields_set:
                raise ValueError("path is missing")
            if self.corpus or self.mirrors or self.mixture:
                raise ValueError('corpus, mirrors and mixture need source = "corpus"')
            return self
        if self.corpus is None:
            raise ValueError("corpus is missing: the digest of the corpus card, which `atoll data show` prints")
        starts = [stage.from_tokens // self.sequence_length for stage in self.mixture]
        if starts and (starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts))):
            raise ValueError("the first stage of mixture begins at from_tokens = 0, the others each later")
        return self


class OptimizerSection(Section):
    """Optimizer of inner steps. The schedule depends on the run's committed tokens."""

    name: Literal["auto", "adamw", "muon"] = "auto"  # muon: Muon for the matrices of blocks, AdamW for the rest
    learning_rate: Rate = BY_RECIPE
    minimum_learning_rate_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup_tokens: Count = 0
    schedule: Literal["constant", "cosine", "linear"] = "cosine"  # from the end of warm-up to stop_tokens
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=1)] = BY_RECIPE
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    micro_batch_samples: Positive = 4
    accumulate: Positive = 1  # micro-batches per inner step
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    activation_checkpointing: bool = False
    compile: bool = False


class PipelineSection(Section):
    """Pipelines over routes, for models that no node can hold alone."""

    codec: Literal["auto", "int8", "bf16", "fp32"] = "auto"  # for activations and gradients between stages
    micro_batches: Annotated[int, Field(ge=1, le=2**16)] | None = (
        None  # per flush, which is a route's inner step; default: accumulate
    )
    ahead: Annotated[int, Field(ge=0, le=64)] = 5  # micro-batches in flight on each link
    second_copies: bool = True  # stages with enough disk also keep a neighbour's layers


CodecName = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "int2"]


def check_codec(name: str) -> None:
    """Raise `UsageError` unless `name` is a codec of run specs."""
    if name not in get_args(CodecName):
        raise UsageError(f"{name!r} is not a codec", f"use one of {', '.join(get_args(CodecName))}")


class SyncSection(Section):
    """Outer rounds: when one is due, its cost, and the outer step that moves the anchor."""

    round_tokens: Positive  # tokens of all members since the last round, once rounds have grown to full size
    round_growth: Annotated[float, Field(gt=0, le=1e6)] = (
        0.1  # an early round is due after this fraction of the tokens so far
    )
    round_max_seconds: timedelta = timedelta(seconds=60)
    exchange_share: Annotated[float, Field(gt=0, le=1)] = (
        0.5  # maximum fraction of a round's time; a longer exchange makes rounds longer
    )
    codec: CodecName = "int4"
    fragments: Annotated[int, Field(ge=1, le=64)] = 4  # groups of layers; each round averages one, in turn
    outer_learning_rate: Rate = BY_RECIPE
    outer_momentum: Fraction = BY_RECIPE
    outer_warmup_tokens: Count = 0  # ramp from plain averaging to the two values above
    screening: bool = True  # leave contributions that do not look like training out of sums
    part_elements: Annotated[int, Field(ge=128, le=2**20)] = 2**20  # maximum size of a part; a multiple of 128

    @field_validator("part_elements")
    @classmethod
    def _whole_blocks(cls, value: int) -> int:
        if value % 128:
            raise ValueError("must be a multiple of 128, the codec's block")
        return value

    @field_validator("round_max_seconds", mode="before")
    @classmethod
    def _seconds(cls, value: object) -> object:
        if not isinstance(value, int | float):
            return value
        if not 0 < value <= MAX_ROUND_SECONDS:  # checked before a timedelta overflows; rejects NaN, too
            raise ValueError(f"must be positive and at most {MAX_ROUND_SECONDS}")
        return timedelta(seconds=value)

    @field_validator("round_max_seconds")
    @classmethod
    def _bounded(cls, value: timedelta) -> timedelta:
        if not timedelta(0) < value <= timedelta(seconds=MAX_ROUND_SECONDS):
            raise ValueError(f"must be positive and at most {MAX_ROUND_SECONDS}")
        return value


class ForkSection(Section):
    """The committed round of another run whose weights this run begins with."""

    run: RunName
    round: Count
    manifest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # hash of the round's manifest


class RunSpec(Section):
    """A whole run spec file."""

    version: int
    run: RunSection
    model: AnyModel = ModelSection()
    data: DataSection
    optimizer: OptimizerSection = OptimizerSection()
    sync: SyncSection
    pipeline: PipelineSection = PipelineSection()
    fork: ForkSection | None = None  # None: the run begins with new weights

    @model_validator(mode="after")
    def _known_version(self) -> RunSpec:
        if self.version != SPEC_VERSION:
            raise ValueError(f"version is {self.version}; this release reads only {SPEC_VERSION}")
        return self

    @model_validator(mode="after")
    def _take_recipe(self) -> RunSpec:
        """Fill in the numbers that the spec leaves to the recipe, so that a resolved spec names every number."""
        recipe = recipe_for(self.model, self.optimizer.name)
        optimizer, sync = self.optimizer, self.sync
        chosen = {"name": recipe.optimizer, **_missing(optimizer, recipe, "learning_rate", "weight_decay")}
        outer = _missing(sync, recipe, "outer_learning_rate", "outer_momentum")
        vars(self).update(optimizer=optimizer.model_copy(update=chosen), sync=sync.model_copy(update=outer))
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step of one node: the effective local batch."""
        return self.optimizer.micro_batch_samples * self.optimizer.accumulate * self.data.sequence_length

    @property
    def samples_per_flush(self) -> int:
        """Samples of one inner step of a route."""
        return self.optimizer.micro_batch_samples * (self.pipeline.micro_batches or self.optimizer.accumulate)

    @property
    def tokens_per_flush(self) -> int:
        """Tokens of one inner step of a route."""
        return self.samples_per_flush * self.data.sequence_length

    def model_hash(self) -> str:
        """Hex SHA-256 of model section and tokenizer, which identifies the architecture."""
        named = {"model": self.model.model_dump(mode="json"), "tokenizer": self.data.tokenizer}
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()

    def resolved_toml(self) -> str:
        """Return the spec as TOML with all defaults."""
        lines = [f"version = {self.version}"]
        for name in ("run", "model", "data", "optimizer", "sync", "pipeline"):
            lines += toml_table(name, dict(getattr(self, name)))
        if self.fork is not None:
            lines += toml_table("fork", dict(self.fork))
        return "\n".join(lines) + "\n"


def _missing(section: Section, recipe: Recipe, *names: str) -> dict[str, float]:
    return {name: getattr(recipe, name) for name in names if getattr(section, name) == BY_RECIPE}


def parse_run_spec(text: str, where: str = "run spec") -> RunSpec:
    """Parse and check TOML text. Raises `RunSpecError`, which names every wrong key."""
    try:
        read = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also raised for numbers of thousands of digits and for deep nesting
        raise RunSpecError(f"{where} is not TOML: {error}") from error
    return check_run_spec(read, where)


def check_run_spec(read: dict[str, Any], where: str = "run spec") -> RunSpec:
    """Check a spec as `tomllib` reads it. Raises `RunSpecError`, which names every wrong key."""
    sync = read.get("sync")
    if isinstance(sync, dict) and sync.get("weights") in ("tokens", "roots"):
        del sync["weights"]  # a key of earlier releases, which wrote it into every resolved spec
    try:
        return RunSpec.model_validate(read)
    except ValidationError as error:
        problems = [_problem(item["loc"], item["msg"], item["type"]) for item in error.errors()]
        told = f"{where}: {problems[0]}" if len(problems) == 1 else "\n  ".join((f"{where}:", *problems))
        raise RunSpecError(told, "docs/reference/run-spec.md lists every key") from error


_MIN_SENSIBLE_ROUNDS = 10


def spec_warnings(spec: RunSpec) -> tuple[str, ...]:
    """Return warnings about values that are valid but probably unintended, one sentence each."""
    stop, warm_up, due = spec.run.stop_tokens, spec.optimizer.warmup_tokens, spec.sync.round_tokens
    found = []
    if warm_up >= stop:
        found.append(
            f"optimizer.warmup_tokens ({warm_up}) is at least run.stop_tokens ({stop}): "
            "warm-up does not end within the run"
        )
    if due * _MIN_SENSIBLE_ROUNDS > stop:
        found.append(
            f"sync.round_tokens ({due}) is more than a tenth of run.stop_tokens ({stop}): the run may have fewer than "
            f"{_MIN_SENSIBLE_ROUNDS} rounds of full size"
        )
    return tuple(found)


def _problem(location: tuple[int | str, ...], message: str, kind: str) -> str:
    if len(location) > 1 and location[0] == "model" and location[1] in ARCHITECTURES:
        location = location[:1] + location[2:]  # pydantic inserts the architecture
    name = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        return f"unknown key {name}{_did_you_mean(name)}"
    if kind == "missing":
        return f"{name} is missing"
    plain = message.removeprefix("Value error, ")
    return f"{name}: {plain}" if name else plain


def _did_you_mean(name: str) -> str:
    """Suggest the same key of another section, or a key with a similar spelling."""
    known = [key for key in _keys(RunSpec) if key != name]
    leaf = name.rpartition(".")[2]
    guesses = [key for key in known if key.rpartition(".")[2] == leaf] or difflib.get_close_matches(name, known, 1, 0.8)
    return f" (did you mean {guesses[0]}?)" if guesses else ""


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys of a section."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in _sections(field.annotation):
            yield from _keys(inner, f"{prefix}{name}.")


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def toml_table(name: str, values: Mapping[str, object]) -> list[str]:
    """Return TOML lines: blank line, header, the keys that are set, then nested tables."""
    lines, tables = [f"\n[{name}]"], []
    for key, value in values.items():
        if isinstance(value, Section | Mapping):
            tables += toml_table(f"{name}.{_toml_key(key)}", dict(value))
        elif value is not None:
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}")
    return lines + tables


def _toml_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _toml_value(key)


def _toml_value(value: object) -> str:
    if isinstance(value, timedelta):
        return repr(value.total_seconds())
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Section | Mapping):
        pairs = [f"{_toml_key(key)} = {_toml_value(item)}" for key, item in dict(value).items() if item is not None]
        return "{ " + ", ".join(pairs) + " }"
    return toml_value(value) if isinstance(value, str | int | float) else repr(value)
