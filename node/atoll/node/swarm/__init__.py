"""All that a node has of hivemind: libp2p's daemon, and the DHT on it.

hivemind's own package imports its averager, its optimiser and its mixture of experts, too, and with them scipy: half of
what it takes to import it (0.7 s on two cores, and 40 MB), at every start of a node, for nothing. So its package stands
here without what its `__init__` does; what is in it is found as ever.
"""

import importlib.util
import sys

if "hivemind" not in sys.modules:
    found = importlib.util.find_spec("hivemind")
    if found is not None:
        sys.modules["hivemind"] = importlib.util.module_from_spec(found)
