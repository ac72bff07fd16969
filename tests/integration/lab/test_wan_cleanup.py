"""Whatever ends a lab, nothing of it stays; what is not its own stays as it is."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.wan import PROBE, needs_wan, small

from atoll.lab.wan import memory, namespaces
from atoll.lab.wan.network import wan_network
from atoll.node.system import child_processes

pytestmark = [*needs_wan, pytest.mark.timeout(400)]
LAB = """
import asyncio, sys
from atoll.lab.wan.network import wan_network
from atoll.lab.wan.topology import load_topology

async def main():
    async with wan_network(load_topology(sys.argv[1])) as network:
        # a grandchild that does not die with its parent
        await network.exec("h0", ["/bin/sh", "-c", "setsid sleep 600 & exec sleep 600"], stdout=-3)
        print(network._claim.token, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
FILE = """
[public]
region = "here"
[[host]]
name = "h0"
region = "here"
memory_mib = 100
[[route]]
between = ["here", "here"]
rtt_ms = 1
"""


def left(token: str) -> list[str]:
    """Everything that carries a lab's name."""
    places = [*namespaces.NAMESPACES.glob(f"atoll-{token}-*"), *namespaces.LABS.glob(f"{token}*")]
    places += [base / f"atoll-{token}" for base in memory._bases() if (base / f"atoll-{token}").exists()]
    return [str(place) for place in places]


def alive(pids: set[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


async def start_lab(directory: Path) -> tuple[asyncio.subprocess.Process, str]:
    """A lab in a process of its own, and its token."""
    topology = directory / "t.toml"
    topology.write_text(FILE)
    child = await child_processes.start(
        [sys.executable, "-c", LAB, str(topology)], environment=os.environ, stdout=asyncio.subprocess.PIPE
    )
    token = (await asyncio.wait_for(child.stdout.readline(), 120)).decode().strip()
    assert len(left(token)) >= 5
    return child, token


async def test_what_a_killed_lab_leaves_goes_at_the_next_start_and_nothing_else(tmp_path):
    foreign = f"atoll-{os.getpid():x}-not-of-a-lab"
    namespaces.ip("netns", "add", foreign)
    killed, token = await start_lab(tmp_path)
    living, other = await start_lab(tmp_path)
    try:
        homes = list(namespaces.NAMESPACES.glob(f"atoll-{token}-*"))
        killed.kill()
        await killed.wait()
        orphans = namespaces.processes_in(homes)
        assert orphans, "the grandchild should have outlived the lab"
        assert left(token)
        async with wan_network(small()) as network:
            assert left(token) == []
            assert network._claim.token != token
        assert not alive(orphans)
        assert (namespaces.NAMESPACES / foreign).exists()
        assert len(left(other)) >= 5
        assert living.returncode is None
    finally:
        namespaces.ip("netns", "delete", foreign)
        living.kill()
        await asyncio.wait_for(living.wait(), 120)
        namespaces.remove_leftovers()
    assert left(other) == []


async def test_an_error_inside_leaves_nothing():
    async def fail_inside(seen):
        async with wan_network(small(memory_mib=100)) as network:
            token = network._claim.token
            child = await network.exec("h0", [*PROBE, "serve", "5000"], stdout=asyncio.subprocess.DEVNULL)
            seen += [token, child]
            assert left(token)
            raise ValueError("mine")

    seen = []
    with pytest.raises(ValueError, match="mine"):
        await fail_inside(seen)
    token, child = seen
    assert left(token) == []
    assert child.returncode is not None


async def test_a_start_that_fails_leaves_nothing(monkeypatch):
    tokens = []

    def fail(claim, *_):
        tokens.append(claim.token)
        raise RuntimeError("mine")

    monkeypatch.setattr(namespaces, "configure", fail)
    with pytest.raises(RuntimeError, match="mine"):
        async with wan_network(small()):
            pass
    assert left(tokens[0]) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("shell", [signal.SIG_DFL, signal.SIG_IGN], ids=["usual", "started in the background"])
def test_a_check_that_is_interrupted_leaves_nothing(number, shell):
    before = set(namespaces.LABS.glob("*.lock"))
    atoll = Path(sys.executable).parent / "atoll"
    ours = signal.signal(signal.SIGINT, shell)  # a script's `command &` runs without SIGINT
    try:
        child = subprocess.Popen([atoll, "lab", "check", "nat-4"], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, ours)
    assert "building" in child.stderr.readline()
    assert "round trips" in child.stderr.readline()
    [lock] = set(namespaces.LABS.glob("*.lock")) - before
    child.send_signal(number)
    _, problems = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in problems
    assert left(lock.stem) == []
