"""What a daemon imports of hivemind."""

import subprocess
import sys
from importlib.metadata import version


def told(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return run.stdout


def test_a_daemon_imports_nothing_of_hivemind_that_it_does_not_use():
    program = (
        "import sys, atoll.node.daemon\n"
        "parts = {name.split('.')[1] for name in sys.modules if name.startswith('hivemind.')}\n"
        "print(sorted(parts & {'averaging', 'moe', 'optim', 'p2p', 'dht'}), 'scipy' in sys.modules)"
    )
    assert told(program) == "['dht', 'p2p'] False\n"


def test_who_asks_for_the_rest_afterwards_has_it():
    program = (
        "import atoll.node.swarm.host, hivemind\n"
        "from hivemind import DHT, Optimizer\n"
        "print(DHT.__name__, hivemind.__version__)"
    )
    assert told(program) == f"DHT {version('hivemind')}\n"


def test_whoever_imported_hivemind_before_keeps_all_of_it():
    assert told("import hivemind, atoll.node.swarm.host; print(hivemind.Optimizer is not None)") == "True\n"
