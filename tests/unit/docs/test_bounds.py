"""No file, function, constructor or class of the product grows beyond the bounds of CONTRIBUTING.md.

A class may have more attributes or methods if a sentence of its docstring says why: "It has many attributes because …",
"It has more than 20 methods: …". Generated code and migrations are exempt; lines are counted with comments and blanks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from .shipped import ROOT

ROOTS = ("core", "node", "coordinator", "lab")  # the generated protobuf code is in none of them
FILE_LINES, MOST_FILES_LINES = 450, 280
FUNCTION_LINES, MOST_FUNCTIONS_LINES = 60, 18
CONSTRUCTOR_PARAMETERS = 10
CLASS_ATTRIBUTES, CLASS_METHODS = 15, 20
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Size:
    """A measured thing, with its docstring in lower case on one line."""

    where: str
    name: str
    figure: int
    docstring: str = ""


@dataclass(frozen=True)
class Sizes:
    """Of all files."""

    files: list[Size]
    functions: list[Size]
    constructors: list[Size]
    attributes: list[Size]
    methods: list[Size]


def measured(sources: Iterable[tuple[str, str]]) -> Sizes:
    """Sizes of these files: path and text of each."""
    sizes = Sizes([], [], [], [], [])
    for path, text in sources:
        sizes.files.append(Size(path, "the file", len(text.splitlines())))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, FUNCTION):
                assert node.end_lineno is not None
                sizes.functions.append(Size(path, node.name, node.end_lineno - node.lineno + 1))
            elif isinstance(node, ast.ClassDef):
                _measure_class(path, node, sizes)
    return sizes


def _measure_class(path: str, node: ast.ClassDef, sizes: Sizes) -> None:
    methods = [item for item in node.body if isinstance(item, FUNCTION)]
    docstring = " ".join((ast.get_docstring(node) or "").lower().split())
    attributes = {name for method in methods for name in _assigned(method)}
    sizes.attributes.append(Size(path, node.name, len(attributes), docstring))
    sizes.methods.append(Size(path, node.name, len(methods), docstring))
    for method in methods:
        if method.name == "__init__":
            given = method.args.posonlyargs + method.args.args + method.args.kwonlyargs
            sizes.constructors.append(Size(path, node.name, len(given) - 1))


def _assigned(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Attributes that a method assigns on `self`."""
    for node in ast.walk(method):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def above(sizes: Iterable[Size], bound: int, unit: str) -> list[str]:
    """One sentence about each that exceeds the bound, the largest first, unless its docstring gives the reason."""
    reason = re.compile(rf"\bit has (?:many|more than)\b[^.:]*\b{unit}\b[^.:]*(?: because|:) \S")
    found = [it for it in sizes if it.figure > bound and not reason.search(it.docstring)]
    return [_sentence(it, bound, unit) for it in sorted(found, key=lambda it: -it.figure)]


def tenth_above(sizes: list[Size], bound: int) -> list[str]:
    """Sentences about those with which more than a tenth exceed the bound: the smallest that do."""
    longer = sorted((it for it in sizes if it.figure > bound), key=lambda it: it.figure)
    allowed = len(sizes) - 1 - len(sizes) * 9 // 10
    return [_sentence(it, bound, "lines") for it in longer[: max(0, len(longer) - allowed)]]


def _sentence(size: Size, bound: int, unit: str) -> str:
    return f"{size.where}: {size.name} has {size.figure} {unit}, bound {bound}"


def _product() -> Iterator[tuple[str, str]]:
    for root in ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            if path.parts[-3:-1] != ("migrations", "versions"):
                yield str(path.relative_to(ROOT)), path.read_text()


def _listed(found: list[str]) -> str:
    return "\n".join(["", *found])


PRODUCT = measured(_product())


def test_no_file_is_too_long() -> None:
    found = above(PRODUCT.files, FILE_LINES, "lines")
    assert not found, _listed(found)


def test_nine_files_in_ten_are_much_shorter() -> None:
    found = tenth_above(PRODUCT.files, MOST_FILES_LINES)
    assert not found, _listed(found)


def test_no_function_is_too_long() -> None:
    found = above(PRODUCT.functions, FUNCTION_LINES, "lines")
    assert not found, _listed(found)


def test_nine_functions_in_ten_are_much_shorter() -> None:
    found = tenth_above(PRODUCT.functions, MOST_FUNCTIONS_LINES)
    assert not found, _listed(found)


def test_no_constructor_has_too_many_parameters() -> None:
    found = above(PRODUCT.constructors, CONSTRUCTOR_PARAMETERS, "parameters")
    assert not found, _listed(found)


def test_a_class_with_many_attributes_says_why() -> None:
    found = above(PRODUCT.attributes, CLASS_ATTRIBUTES, "attributes")
    assert not found, _listed(found)


def test_a_class_with_many_methods_says_why() -> None:
    found = above(PRODUCT.methods, CLASS_METHODS, "methods")
    assert not found, _listed(found)


def test_the_page_for_contributors_names_these_bounds() -> None:
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert f"A file has at most {FILE_LINES} lines, and nine in ten have at most {MOST_FILES_LINES}" in page
    assert f"A function has at most {FUNCTION_LINES} lines, and nine in ten have at most {MOST_FUNCTIONS_LINES}" in page
    assert f"a constructor at most {CONSTRUCTOR_PARAMETERS} parameters" in page
    assert f"more than {CLASS_ATTRIBUTES} attributes or {CLASS_METHODS} methods" in page


LARGE = '''
class Large:
    """A class. It has {reason} each
    is one. Others have neither attributes nor methods: they are small."""

    def __init__(self, one, two, *, three):
        self.one, self.two = one, two
        self.three: int = three

    async def reset(self):
        self.one = self.four = 0
        other.five = 1
'''


def test_what_is_too_large_is_found_with_its_figure() -> None:
    sizes = measured([("large.py", LARGE)])
    assert above(sizes.files, 11, "lines") == ["large.py: the file has 12 lines, bound 11"]
    assert above(sizes.files, 12, "lines") == []
    assert above(sizes.functions, 2, "lines") == [
        "large.py: __init__ has 3 lines, bound 2",
        "large.py: reset has 3 lines, bound 2",
    ]
    assert above(sizes.constructors, 2, "parameters") == ["large.py: Large has 3 parameters, bound 2"]
    assert above(sizes.attributes, 3, "attributes") == ["large.py: Large has 4 attributes, bound 3"]
    assert above(sizes.methods, 1, "methods") == ["large.py: Large has 2 methods, bound 1"]


@pytest.mark.parametrize(("words", "why"), [("many", " because"), ("more than 1", ":")])
def test_a_reason_counts_only_for_what_it_names(words: str, why: str) -> None:
    for reason, other in (("attributes", "methods"), ("methods", "attributes")):
        sizes = measured([("large.py", LARGE.format(reason=f"{words} {reason}{why}"))])
        assert above(getattr(sizes, reason), 0, reason) == []
        assert above(getattr(sizes, other), 0, other) != []


def test_a_tenth_may_be_longer_and_no_more() -> None:
    sizes = [Size("a.py", f"f{lines}", lines) for lines in range(1, 21)]
    assert tenth_above(sizes, 19) == []
    assert tenth_above(sizes, 18) == ["a.py: f19 has 19 lines, bound 18"]


def test_one_reason_may_be_for_both() -> None:
    sizes = measured([("large.py", LARGE.format(reason="many attributes and methods because"))])
    assert above(sizes.attributes, 0, "attributes") == above(sizes.methods, 0, "methods") == []
