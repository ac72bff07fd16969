"""install_lazy_hivemind: import hivemind's DHT and libp2p client without the rest of hivemind, and without torch.

Three of hivemind's packages import everything in their `__init__`: its averager, its optimiser and its mixture of
experts, and with them torch and scipy. A member's daemon needs none of these for the swarm, and a seed has no torch
(docs/adr/0017-seeds-without-torch.md).

A lazy package does not run its `__init__`. A submodule, and a name that the `__init__` would import from one, is
imported when it is first used. Constants of the `__init__` are defined from the start. The package has no other names.

Threads may use a package at once: imports wait for one another, and nothing else changes. A lock around them could only
deadlock with the locks of imports.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.util
import sys
from types import ModuleType

_PACKAGES = ("hivemind", "hivemind.utils", "hivemind.dht")  # a package comes before its subpackages


def install_lazy_hivemind() -> None:
    """Put the lazy packages into `sys.modules`. A program calls this once at its start, before it imports hivemind.

    No effect if hivemind is imported already or is not installed.
    """
    if "hivemind" in sys.modules or importlib.util.find_spec("hivemind") is None:
        return
    for name in _PACKAGES:
        sys.modules[name] = package = _lazy_package(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, package)


def _lazy_package(package_name: str) -> ModuleType:
    found = importlib.util.find_spec(package_name)
    assert found is not None
    assert isinstance(found.loader, importlib.abc.InspectLoader)
    package = importlib.util.module_from_spec(found)
    source = ast.parse(found.loader.get_source(package_name) or "")
    package.__dict__.update(_constants(source))
    origins = _imported_names(source)

    def load(name: str) -> object:
        if name in origins:
            module, original = origins[name]
            value = getattr(importlib.import_module(module), original)
        elif _is_submodule(package_name, name):
            value = importlib.import_module(f"{package_name}.{name}")
        else:
            raise AttributeError(f"module {package_name!r} has no attribute {name!r}", name=name, obj=package)
        setattr(package, name, value)
        return value

    package.__dict__["__getattr__"] = load  # PEP 562
    return package


def _is_submodule(package_name: str, name: str) -> bool:
    private = name.startswith("__")  # such as `__path__`, for which the import system asks
    return name.isidentifier() and not private and importlib.util.find_spec(f"{package_name}.{name}") is not None


def _imported_names(source: ast.Module) -> dict[str, tuple[str, str]]:
    """Return the origin of each name in an `__init__`: the module, and the name there."""
    imports = (node for node in source.body if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}


def _constants(source: ast.Module) -> dict[str, object]:
    """Return the constants of an `__init__`, such as its version."""
    assigned = ((node.targets[0], node.value) for node in source.body if isinstance(node, ast.Assign))
    return {
        target.id: value.value
        for target, value in assigned
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant)
    }
