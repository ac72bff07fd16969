"""install_lazy_hivemind: import hivemind's DHT and libp2p client without the rest of hivemind.

hivemind's `__init__` imports its averager, its optimiser and its mixture of experts, and with them scipy. That is half
of its import time (0.7 s on two cores) and 40 MB, at every start of a node, for parts that Atoll does not use. The lazy
package does not run `__init__`. Its submodules import as usual; any other attribute loads the full package.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def install_lazy_hivemind() -> None:
    """Put the lazy package into `sys.modules`. A program calls this once at its start, before it imports hivemind.

    No effect if hivemind is imported already or is not installed.
    """
    if "hivemind" not in sys.modules and (package := _lazy_package()) is not None:
        sys.modules["hivemind"] = package


def _lazy_package() -> ModuleType | None:
    found = importlib.util.find_spec("hivemind")
    if found is None:
        return None
    package = importlib.util.module_from_spec(found)

    def load_all(name: str) -> object:
        if (name.startswith("__") and name != "__version__") or f"hivemind.{name}" in sys.modules:
            raise AttributeError(name)  # in the latter case, the submodule is just being imported
        del package.__dict__["__getattr__"]
        if found.loader is not None:
            found.loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = load_all  # PEP 562
    return package
