"""A mutant, and how it takes the place of the loaded code.

A mutant is a mutated source. The code of the one function that differs, or the one constant, replaces that of the
loaded module. So nothing is imported again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One change of one function or constant."""

    path: str  # of the source file, in the repository
    where: str  # Class.method, function or constant
    line: int  # the first that differs
    was: str
    became: str
    source: str  # of the whole module

    @property
    def name(self) -> str:
        """What the list of accepted survivors calls it; line numbers change too often."""
        return f"{self.where}: {self.was} → {self.became}"

    def install(self, module: ModuleType) -> None:
        """Put it in the place of the loaded code, in this process."""
        namespace: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
        exec(compile(self.source, str(module.__file__), "exec"), namespace)
        if isinstance(namespace.get(self.where), FunctionType) or "." in self.where:
            live, mutated = function_at(vars(module), self.where), function_at(namespace, self.where)
            live.__code__ = mutated.__code__
            live.__defaults__, live.__kwdefaults__ = mutated.__defaults__, mutated.__kwdefaults__
            return
        before = vars(module)[self.where]
        for other in list(sys.modules.values()):  # also where it was imported by name
            if other.__name__.startswith("atoll.") and vars(other).get(self.where) is before:
                setattr(other, self.where, namespace[self.where])


def module_of(path: str) -> ModuleType:
    """Import the module at `path` in the repository."""
    return importlib.import_module(".".join(Path(path).with_suffix("").parts[1:]))


@contextmanager
def changed(path: str, where: str, was: str, became: str) -> Iterator[None]:
    """For a while, in function `where` of the module at `path`, `became` stands in the place of `was`."""
    source = (ROOT / path).read_text()
    assert source.count(was) == 1, f"{path} does not have this once any more: {was}"
    module = module_of(path)
    live = function_at(vars(module), where)
    before = live.__code__, live.__defaults__, live.__kwdefaults__
    Mutant(path, where, 0, was, became, source.replace(was, became)).install(module)
    assert live.__code__ != before[0], f"{was} does not stand in {where}"
    try:
        yield
    finally:
        live.__code__, live.__defaults__, live.__kwdefaults__ = before


def function_at(namespace: dict[str, Any], where: str) -> FunctionType:
    """The plain function that stands there, or inside a property or class method."""
    found: Any = namespace
    for name in where.split("."):
        found = found[name] if isinstance(found, dict) else vars(found)[name]
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    found = getattr(found, "__func__", found)
    assert isinstance(found, FunctionType), where
    return found
