"""The pages say what the programs do: commands, links, and tables that must follow the code."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from atoll.coordinator.config import CoordinatorConfig
from atoll.core import errors
from atoll.core.built_in_shape import PRESETS
from atoll.core.model_spec import AdapterSection, BaseSection, HuggingFaceModel, ModelSection
from atoll.core.run_spec import BY_RECIPE, RunSpec, parse_run_spec
from atoll.node.config import NodeConfig

from .shipped import ROOT, commands, documents, plain, problem, table

PAGES = pytest.mark.parametrize("page", documents(), ids=lambda path: str(path.relative_to(ROOT)))
RUN_SPEC = ROOT / "docs/reference/run-spec.md"
EXIT_CODES = ROOT / "docs/reference/exit-codes.md"
MODELS = {
    "[model]": ModelSection,
    "of a Hugging Face decoder": HuggingFaceModel,
    "[model.base]": BaseSection,
    "[model.adapter]": AdapterSection,
}
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")


@PAGES
def test_every_command_can_be_typed(page: Path) -> None:
    assert [why for words in commands(page) if (why := problem(words))] == []


@PAGES
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor[1:] in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@PAGES
def test_every_path_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"(?<![\w./-])((?:docs|deploy|tests|benchmarks)/[\w./-]+\w)", page.read_text())
    assert [path for path in named if not (ROOT / path).exists() and path != "benchmarks/results"] == []


def test_run_spec_page_lists_exactly_the_keys_with_their_defaults() -> None:
    documented = {("", plain(row[0])): plain(row[1]) for row in table(RUN_SPEC) if plain(row[0]) == "version"}
    expected = {("", "version"): "required"}
    for section, field in RunSpec.model_fields.items():
        kinds = [it for it in get_args(field.annotation) if it is not NoneType] or [field.annotation]
        models = MODELS if section == "model" else {f"[{section}]": kinds[0]}
        for title, model in models.items() if section != "version" else ():
            assert isinstance(model, type)
            assert issubclass(model, BaseModel)
            expected |= {(title, key): _default(item) for key, item in model.model_fields.items()}
            heading = f"## `{title}`" if title.endswith("]") else f"## `[model]` {title}"
            rows = [row for row in table(RUN_SPEC, heading) if len(row) == 4]
            documented |= {(title, plain(row[0])): plain(row[1]) for row in rows}
    assert documented == expected


def test_run_spec_page_has_the_presets() -> None:
    rows = [row for row in table(RUN_SPEC, "## `[model]`") if len(row) == 7]
    documented = {plain(row[0]): (row[2], row[3], row[4], row[5], row[6]) for row in rows}
    assert documented == {
        name: (
            str(shape.dimension),
            str(shape.layers),
            f"{shape.heads} ({shape.kv_heads})",
            str(shape.hidden_dimension),
            "yes" if shape.tie_embeddings else "no",
        )
        for name, shape in PRESETS.items()
    }


def test_exit_code_page_lists_every_code_and_every_error() -> None:
    rows = table(EXIT_CODES)
    codes = {int(row[0]): plain(row[1]) for row in rows if row[0].isdigit()}
    assert codes == {int(code): code.name for code in errors.ExitCode}
    documented = {plain(row[0]): (int(row[1]), plain(row[2])) for row in rows if not row[0].isdigit()}
    assert documented == {cls.__name__: (int(cls.exit_code), cls.grpc_status) for cls in _below(errors.AtollError)}


@pytest.mark.parametrize(
    ("page", "keys"),
    [
        ("volunteer.md", {item.name for item in fields(NodeConfig)}),
        ("operator.md", set(CoordinatorConfig.model_fields)),
    ],
)
def test_guides_list_every_setting(page: str, keys: set[str]) -> None:
    assert {plain(row[0]) for row in table(ROOT / "docs/guide" / page, "## Settings")} == keys


def test_example_run_spec_is_one() -> None:
    spec = parse_run_spec((ROOT / "deploy/examples/run.toml").read_text())
    steps = spec.sync.round_tokens / spec.tokens_per_step
    assert 20 <= steps / 4 <= 60, "the comment in the example speaks of about 30 steps of four nodes"


def _below(cls: type[errors.AtollError]) -> list[type[errors.AtollError]]:
    return [item for sub in cls.__subclasses__() if sub.__module__ == errors.__name__ for item in (sub, *_below(sub))]


def _default(field: FieldInfo) -> str:
    """A key's default as the page writes it."""
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "–"
    if value == BY_RECIPE:
        return "by recipe"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, timedelta):
        return str(value.total_seconds())
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)
