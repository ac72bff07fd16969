"""install_lazy_hivemind: import hivemind's DHT and libp2p client without the rest of hivemind, and without torch.

Three of hivemind's packages import everything in their `__init__`: its averager, its optimiser and its mixture of
experts, and with them torch and scipy. A member's daemon needs none of these for the swarm, and a seed has no torch
(docs/adr/0017-seeds-without-torch.md).

A lazy package does not run its `__init__`. Its submodules import as usual. A name that the `__init__` would import from
a submodule is imported from there when it is first used. Any other name runs the `__init__`.
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
    package, loader = importlib.util.module_from_spec(found), found.loader
    origins = _imported_names(loader.get_source(package_name) or "")

    def load(name: str) -> object:
        submodule = f"{package_name}.{name}"
        if (name.startswith("__") and name != "__version__") or submodule in sys.modules:
            raise AttributeError(name)  # in the latter case, the submodule is just being imported
        if name in origins:
            value = getattr(importlib.import_module(origins[name]), name)
            setattr(package, name, value)
            return value
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = load  # PEP 562
    return package


def _imported_names(source: str) -> dict[str, str]:
    """Return the module from which each name of an `__init__` is imported."""
    imports = (node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname is None}
