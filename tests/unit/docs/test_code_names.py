"""Pages name only files, functions and tests that exist: a move or a new name in the code must reach them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from .shipped import ROOT, documents

PAGES = pytest.mark.parametrize("page", documents(), ids=lambda path: str(path.relative_to(ROOT)))
ROOTS = ("core", "protos", "node", "coordinator", "lab", "tests", "benchmarks", "docs", "deploy")
CODE = {f"/{path.relative_to(ROOT)}": path for root in ROOTS for path in (ROOT / root).rglob("*.py")}
TESTS = {
    name
    for path, file in CODE.items()
    if path.startswith("/tests/")
    for name in re.findall(r"def (test_\w+)", file.read_text())
}

_FILE = re.compile(r"(?<![\w./*-])([\w./-]*\w\.py)\b")
_NAME = r"[A-Za-z_][\w.]*"
_PROSE = re.compile(rf"`([\w./-]+\.py)`:\s((?:`{_NAME}`(?:,\s|\sand\s|,\sthen\s)?)+)")  # `file.py`: `one`, `two`
_DRAWING = re.compile(rf"([\w./-]+\.py)((?:,? {_NAME}\(\))+)")  # file.py one(), two()
_TEST = re.compile(r"\b(test_\w+)\b(?!\.py)(…?)")  # `test_begins_so…` may stand for one test


def files(named: str) -> list[Path]:
    """The files whose path ends with `named`."""
    return [path for name, path in CODE.items() if name.endswith(f"/{named}")]


def pairs(text: str) -> list[tuple[str, str]]:
    """Every file with a name that a page says is in it."""
    found = _PROSE.findall(text) + _DRAWING.findall(text)
    return [(file, name) for file, names in found for name in re.findall(_NAME, names.replace(" and ", " "))]


@functools.cache
def defined(file: Path) -> frozenset[str]:
    """Names that the file defines: of classes, functions, fields and constants; `Class.name` for what is in a class."""
    names: set[str] = set()
    tree = ast.parse(file.read_text())
    for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
        own = {name for node in scope.body for name in _names(node)}
        names |= own | {f"{scope.name}.{name}" for name in own} if isinstance(scope, ast.ClassDef) else own
    return frozenset(names)


@PAGES
def test_every_python_file_exists(page: Path) -> None:
    named = set(_FILE.findall(page.read_text()))
    assert sorted(name for name in named if not files(name)) == []


@PAGES
def test_every_name_is_in_the_file_that_the_page_says(page: Path) -> None:
    wrong = [pair for pair in pairs(page.read_text()) if not any(pair[1] in defined(file) for file in files(pair[0]))]
    assert wrong == []


@PAGES
def test_every_test_exists(page: Path) -> None:
    named = _TEST.findall(page.read_text())
    assert [name for name, cut in named if name not in TESTS and not (cut and _begins_a_test(name))] == []


def test_a_stale_name_is_found() -> None:
    text = "`rounds/engine.py`: `AveragingEngine._freeze` and `gone`\n rounds/engine.py AveragingEngine.gone()"
    assert pairs(text) == [
        ("rounds/engine.py", "AveragingEngine._freeze"),
        ("rounds/engine.py", "gone"),
        ("rounds/engine.py", "AveragingEngine.gone"),
    ]
    (engine,) = files("rounds/engine.py")
    assert [name in defined(engine) for _, name in pairs(text)] == [True, False, False]
    assert "_freeze" in defined(engine)
    assert "Follower" not in defined(engine)  # used there, defined elsewhere
    assert files("node/rounds/engine.py") == [engine]
    assert files("gine.py") == []


def _begins_a_test(name: str) -> bool:
    return any(test.startswith(name) for test in TESTS)


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
        case _:
            return []
