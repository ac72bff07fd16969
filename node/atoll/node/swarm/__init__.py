"""All that a node has of hivemind: libp2p's daemon, and the DHT on it.

hivemind's own package imports its averager, its optimiser and its mixture of experts, too, and with them scipy: half of
what it takes to import it (0.7 s on two cores, and 40 MB), at every start of a node, for nothing. So its package stands
here without what its `__init__` does; what is in it is found as ever, and who asks for more of it has it all.
"""

import importlib.util
import sys
from types import ModuleType


def _lazy_hivemind() -> ModuleType | None:
    found = importlib.util.find_spec("hivemind")
    if found is None:
        return None
    package = importlib.util.module_from_spec(found)

    def all_of_it(name: str) -> object:
        if (name.startswith("__") and name != "__version__") or f"hivemind.{name}" in sys.modules:
            raise AttributeError(name)  # the latter: a part that is just being imported
        del package.__dict__["__getattr__"]
        if found.loader is not None:
            found.loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = all_of_it  # PEP 562
    return package


if "hivemind" not in sys.modules and (package := _lazy_hivemind()) is not None:
    sys.modules["hivemind"] = package
