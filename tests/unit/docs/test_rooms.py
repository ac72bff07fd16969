"""Pages show the rooms that exist and the arrows that `make check` enforces."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from .shipped import ROOT

NODE, COORDINATOR = ROOT / "node/atoll/node", ROOT / "coordinator/atoll/coordinator"
ARCHITECTURE = (ROOT / "docs/explain/architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def rooms(root: Path) -> set[str]:
    return {path.parent.name for path in root.glob("*/*.py")}


def drawn(column: slice) -> list[str]:
    """Lines of one column of the drawing of layers, without `.py`."""
    text = ARCHITECTURE[ARCHITECTURE.index("\n node/atoll/node  ") :]
    lines = [line[column].strip() for line in text[: text.index("```")].splitlines()[2:]]
    return [line.replace(".py", "") for line in lines if line]


def layers(root: str) -> list[str]:
    return next(contract["layers"] for contract in CONTRACTS if contract.get("containers") == [root])


def outside_swarm() -> set[str]:
    (contract,) = (item for item in CONTRACTS if item.get("forbidden_modules") == ["hivemind"])
    return set(contract["source_modules"])


@pytest.mark.parametrize("page", ["docs/explain/architecture.md", "CONTRIBUTING.md"])
@pytest.mark.parametrize("root", [NODE, COORDINATOR], ids=["node", "coordinator"])
def test_a_page_has_a_row_for_each_room(page: str, root: Path) -> None:
    rows = re.findall(r"^\| (.*?) \|", (ROOT / page).read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert rooms(root) - named == set()


@pytest.mark.parametrize(
    ("root", "column"),
    [("atoll.node", slice(0, 50)), ("atoll.coordinator", slice(50, None))],
    ids=lambda item: str(item),
)
def test_the_drawing_of_layers_is_what_the_linter_enforces(root: str, column: slice) -> None:
    assert drawn(column) == layers(root)


def test_every_room_but_swarm_is_kept_from_importing_hivemind() -> None:
    modules = {f"atoll.node.{path.stem}" for path in NODE.glob("*.py") if path.stem != "__init__"}
    modules |= {f"atoll.node.{room}" for room in rooms(NODE) - {"swarm"}}
    assert modules - outside_swarm() == set()
