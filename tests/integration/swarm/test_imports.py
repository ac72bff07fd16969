"""The parts of hivemind that a daemon imports."""

import subprocess
import sys
from importlib.metadata import version


def told(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return run.stdout


def test_a_daemon_imports_nothing_of_hivemind_that_it_does_not_use():
    program = (
        "import sys\n"
        "from atoll.node.swarm.lazy_hivemind import install_lazy_hivemind\n"
        "install_lazy_hivemind()\n"
        "import atoll.node.daemon\n"
        "parts = {name.split('.')[1] for name in sys.modules if name.startswith('hivemind.')}\n"
        "print(sorted(parts & {'averaging', 'moe', 'optim', 'p2p', 'dht'}), 'scipy' in sys.modules)"
    )
    assert told(program) == "['dht', 'p2p'] False\n"


def test_any_other_attribute_loads_the_full_package():
    program = (
        "from atoll.node.swarm.lazy_hivemind import install_lazy_hivemind\n"
        "install_lazy_hivemind()\n"
        "import atoll.node.swarm.host, hivemind\n"
        "from hivemind import DHT, Optimizer\n"
        "print(DHT.__name__, hivemind.__version__)"
    )
    assert told(program) == f"DHT {version('hivemind')}\n"


def test_a_program_that_imported_hivemind_before_keeps_the_full_package():
    program = (
        "import hivemind\n"
        "from atoll.node.swarm.lazy_hivemind import install_lazy_hivemind\n"
        "before = sys.modules['hivemind']\n"
        "install_lazy_hivemind()\n"
        "print(sys.modules['hivemind'] is before)"
    )
    assert told("import sys\n" + program) == "True\n"
