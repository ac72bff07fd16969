"""The parts of hivemind that a daemon imports, and the libraries that a seed does without."""

import subprocess
import sys

INSTALL = "from atoll.node.swarm.lazy_hivemind import install_lazy_hivemind\ninstall_lazy_hivemind()\n"
WITHOUT_TORCH = (
    "import sys\n"
    "class Absent:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.partition('.')[0] in ('torch', 'numpy', 'scipy', 'httpx', 'fsspec'):\n"
    "            raise ModuleNotFoundError(name, name=name)\n"
    "sys.meta_path.insert(0, Absent())\n"
)


def told(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
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
    program = WITHOUT_TORCH + (
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


def test_lazy_packages_have_every_name_of_the_full_ones():
    names = (
        "import hivemind.utils, hivemind.dht\n"
        "print([[package.__name__, name] for package in (hivemind, hivemind.utils, hivemind.dht)\n"
        "       for name in vars(package) if name[0] != '_' or name == '__version__'])"
    )
    places = told(names).strip()
    assert "['hivemind', 'Optimizer']" in places
    values = (
        "import sys, hivemind.utils, hivemind.dht\n"
        f"for package, name in {places}:\n"
        "    value = getattr(sys.modules[package], name)\n"
        "    kind = [type(value).__name__, getattr(value, '__module__', ''), getattr(value, '__name__', value)]\n"
        "    print(package, name, kind)"
    )
    assert told(INSTALL + values) == told(values)


def test_a_name_that_is_not_there_leaves_the_package_as_it_was():
    program = (
        "import hivemind.utils\n"
        "print([hasattr(hivemind.utils, name) for name in ('nothing', 'no.thing', '__wrapped__')])\n"
        "try:\n"
        "    hivemind.utils.MPFuture\n"
        "except ModuleNotFoundError as error:\n"
        "    print('needs', error.name)\n"
        "from hivemind.utils import get_logger\n"
        "print(get_logger.__module__, hivemind.utils.timed_storage.__name__)\n"
        "try:\n"
        "    from hivemind.utils import nothing\n"
        "except ImportError as error:\n"
        "    print(error.name)"
    )
    assert told(WITHOUT_TORCH + INSTALL + program) == (
        "[False, False, False]\nneeds torch\nhivemind.utils.logging hivemind.utils.timed_storage\nhivemind.utils\n"
    )


def test_threads_may_use_a_lazy_package_for_the_first_time_at_once():
    program = (
        "import threading, hivemind.utils, hivemind.dht\n"
        "start, seen = threading.Barrier(16), []\n"
        "def use():\n"
        "    start.wait()\n"
        "    utils, dht = hivemind.utils, hivemind.dht\n"
        "    seen.append((utils.TimedStorage, utils.logging, dht.DHTID, utils.nested, dht.traverse))\n"
        "threads = [threading.Thread(target=use) for _ in range(16)]\n"
        "for each in threads: each.start()\n"
        "for each in threads: each.join()\n"
        "print(len(seen), len(set(seen)))"
    )
    assert told(INSTALL + program) == "16 1\n"


def test_a_program_that_imported_hivemind_before_keeps_the_full_package():
    program = (
        "import hivemind\n"
        "from atoll.node.swarm.lazy_hivemind import install_lazy_hivemind\n"
        "before = sys.modules['hivemind']\n"
        "install_lazy_hivemind()\n"
        "print(sys.modules['hivemind'] is before)"
    )
    assert told("import sys\n" + program) == "True\n"
