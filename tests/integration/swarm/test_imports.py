"""The parts of hivemind that a daemon imports, and the libraries that a seed does without."""

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
        "import atoll.node.daemon, atoll.node.training_member\n"
        "parts = {name.split('.')[1] for name in sys.modules if name.startswith('hivemind.')}\n"
        "print(sorted(parts & {'averaging', 'moe', 'optim', 'p2p', 'dht'}), 'scipy' in sys.modules)"
    )
    assert told(program) == "['dht', 'p2p'] False\n"


def test_a_seeds_daemon_imports_where_torch_numpy_and_scipy_cannot_be_imported():
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'numpy', 'scipy', 'httpx', 'fsspec'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from atoll.node.swarm.lazy_hivemind import install_lazy_hivemind\n"
        "install_lazy_hivemind()\n"
        "import atoll.node.daemon, atoll.node.start, atoll.node.cli.join\n"
        "try:\n"
        "    import atoll.node.training_member\n"
        "except ModuleNotFoundError as error:\n"
        "    print('training needs', error.name)"
    )
    assert told(program) == "training needs torch\n"


def test_a_name_of_a_lazy_package_is_that_of_its_submodule():
    program = (
        "import sys\n"
        "from atoll.node.swarm.lazy_hivemind import install_lazy_hivemind\n"
        "install_lazy_hivemind()\n"
        "from hivemind.utils import MSGPackSerializer, get_logger\n"
        "import hivemind.utils\n"
        "import hivemind.utils.serializer as submodule\n"
        "print(MSGPackSerializer is submodule.MSGPackSerializer, 'torch' in sys.modules)\n"
        "from hivemind.utils import MPFuture\n"
        "print(MPFuture.__module__, 'torch' in sys.modules)\n"
        "print(hasattr(hivemind.utils, 'no_such_name'))"
    )
    assert told(program) == "True False\nhivemind.utils.mpfuture True\nFalse\n"


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
