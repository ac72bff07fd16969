"""A WAN on this machine: `async with wan_network(load_topology("home-4")) as network`.

Every host is a network namespace with its own address. A program in it has one network device, and reaches the other
hosts at the rates and round-trip times of the topology. All hosts share files and local sockets. Needs root.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from atoll.core.errors import DeadlineExceeded
from atoll.lab.wan import control, namespaces
from atoll.lab.wan.errors import LabBroken
from atoll.lab.wan.hub import HostNamespace, enter_namespace
from atoll.lab.wan.memory import MemoryLimit, limit_hosts
from atoll.lab.wan.topology import Topology
from atoll.node.system import child_processes

T = TypeVar("T")

START_TIMEOUT = timedelta(seconds=60)
STOP_GRACE = timedelta(seconds=5)
# Each host has its own network with a public-looking address, because libp2p considers private addresses unreachable.
# No packet leaves the namespaces.
_ADDRESS = "11.{}.0.1"
_FIRST_NET = 10
_ENTER = """
import ctypes, os, resource, sys
namespace, group, data_bytes = sys.argv[1:4]
if group:
    open(group, "w").write(str(os.getpid()))
if int(data_bytes):
    resource.setrlimit(resource.RLIMIT_DATA, (int(data_bytes), int(data_bytes)))
kernel = ctypes.CDLL(None, use_errno=True)
with open(namespace) as handle:
    if kernel.setns(handle.fileno(), 0x40000000):
        sys.exit(os.strerror(ctypes.get_errno()))
os.execv(sys.argv[4], sys.argv[4:])
"""


@dataclass
class WanNetwork:
    """A running WAN. Changes apply to later packets. Every call raises `LabBroken` if the hub has ended."""

    topology: Topology
    addresses: Mapping[str, str]  # by host
    memory: Mapping[str, MemoryLimit]
    _claim: namespaces.Claim
    _hub: asyncio.subprocess.Process
    _control: control.HubControl
    _children: list[asyncio.subprocess.Process] = field(default_factory=list)

    # --- programs ------------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """Return a host's address. Raises `TopologyError` for an unknown host."""
        return self.addresses[self.topology.host(host).name]

    async def inside(self, host: str, function: Callable[[], T]) -> T:
        """Call a function in a thread of the host's namespace, where it can open sockets but no processes."""
        path = self._claim.path(self.topology.host(host).name)

        def enter() -> T:
            enter_namespace(path)
            return function()

        # The thread must end afterwards: a shared one would stay in the namespace.
        with ThreadPoolExecutor(max_workers=1) as threads:
            return await asyncio.get_running_loop().run_in_executor(threads, enter)

    def command(self, host: str, command: Sequence[str | Path]) -> list[str]:
        """Wrap `command` (an absolute path and arguments) so that it runs on the host, under its memory limit.

        The wrapper execs the command, so the process id stays the same. Raises `TopologyError` for an unknown host.
        """
        limit = self.memory[self.topology.host(host).name]
        enter = [sys.executable, "-I", "-S", "-c", _ENTER, str(self._claim.path(host))]
        return [*enter, limit.processes_file, str(limit.data_bytes), *map(str, command)]

    async def exec(
        self,
        host: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: child_processes.Output = asyncio.subprocess.DEVNULL,
        stdout: child_processes.Output = None,
        stderr: child_processes.Output = None,
        cwd: Path | None = None,
    ) -> asyncio.subprocess.Process:
        """Start a program on a host. It ends with the lab at the latest."""
        child = await child_processes.start(
            self.command(host, command),
            environment=os.environ if environment is None else environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
        )
        self._children = [*(it for it in self._children if it.returncode is None), child]
        return child

    # --- faults --------------------------------------------------------------------------------------

    def set_host(self, host: str, **values: float) -> None:
        """Change a host's `uplink_mbit`, `downlink_mbit`, `queue_ms`, `jitter_ms` or `loss`. Raises `TopologyError`."""
        self._ask(control.SetHost(host, values))
        if "uplink_mbit" in values:
            namespaces.set_burst(self._claim, host, values["uplink_mbit"])

    def set_route(self, one: str, other: str, **values: float) -> None:
        """Change `rtt_ms`, `jitter_ms` or `loss` between two hosts. Raises `TopologyError`."""
        self._ask(control.SetRoute(one, other, values))

    def cut(self, host: str) -> None:
        """Drop all packets to and from a host, including those in flight."""
        self._ask(control.Cut(host))

    def restore(self, host: str) -> None:
        """Undo `cut`."""
        self._ask(control.Restore(host))

    def partition(self, *groups: Sequence[str]) -> None:
        """Split the network: only hosts of one group reach each other. Hosts in no group form one more group."""
        self._ask(control.Partition([list(group) for group in groups]))

    def heal(self) -> None:
        """Undo `partition`."""
        self._ask(control.Heal())

    def counters(self) -> control.HubCounters:
        """Read the traffic counters of hosts and pairs."""
        self.check()
        return self._control.counters()

    def check(self) -> None:
        """Raise `LabBroken` with the last line of the hub's log if it ended."""
        if self._hub.returncode is not None:
            raise LabBroken(f"the hub ended with {self._hub.returncode}: {_log_tail(self._claim.directory)}")

    def _ask(self, request: control.Request) -> None:
        self.check()
        self._control.ask(request)

    async def _close(self) -> None:
        self._control.close()
        await asyncio.gather(*(child_processes.stop(child, STOP_GRACE) for child in self._children))


@asynccontextmanager
async def wan_network(topology: Topology, *, seed: int = 0) -> AsyncIterator[WanNetwork]:
    """Build the network and remove it in every case. First removes leftovers of killed labs.

    `seed` is for losses and jitter. Raises `LabUnavailable`, `LabBroken`.
    """
    await asyncio.to_thread(namespaces.remove_leftovers)
    claim = namespaces.claim()
    hub: asyncio.subprocess.Process | None = None
    try:
        addresses = {host.name: _ADDRESS.format(_FIRST_NET + i) for i, host in enumerate(topology.hosts)}
        await asyncio.to_thread(namespaces.add, claim, topology.hosts)
        hub = await _start_hub(topology, claim, addresses, seed)
        for host in topology.hosts:
            await asyncio.to_thread(namespaces.configure, claim, host, addresses[host.name], topology.congestion)
        memory = limit_hosts(claim.token, {host.name: host.memory_mib for host in topology.hosts})
        network = WanNetwork(
            topology, addresses, memory, claim, hub, control.HubControl(_control_path(claim.directory))
        )
        try:
            yield network
        finally:
            await network._close()
    finally:
        try:
            if hub is not None:
                await child_processes.stop(hub, STOP_GRACE)
        finally:
            await asyncio.shield(asyncio.to_thread(claim.release))


async def _start_hub(
    topology: Topology, claim: namespaces.Claim, addresses: Mapping[str, str], seed: int
) -> asyncio.subprocess.Process:
    seats = [asdict(HostNamespace(name, str(claim.path(name)), address)) for name, address in addresses.items()]
    document = {"name": topology.name, "topology": topology.to_document(), "seats": seats, "seed": seed}
    document["control"] = str(_control_path(claim.directory))
    with (claim.directory / "hub.log").open("wb") as log:
        hub = await child_processes.start(
            [sys.executable, "-m", "atoll.lab.wan.hub"],
            environment=os.environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert hub.stdin is not None
    assert hub.stdout is not None
    try:
        hub.stdin.write(json.dumps(document).encode() + b"\n")
        async with asyncio.timeout(START_TIMEOUT.total_seconds()):
            with suppress(ConnectionError):  # the reason is in its log
                await hub.stdin.drain()
            ready = await hub.stdout.readline()
    except TimeoutError as error:
        await child_processes.stop(hub, STOP_GRACE)
        raise DeadlineExceeded(f"the hub did not start within {START_TIMEOUT.total_seconds():.0f} s") from error
    except BaseException:
        await child_processes.stop(hub, STOP_GRACE)
        raise
    if not ready:
        await child_processes.stop(hub, STOP_GRACE)
        raise LabBroken(f"the hub did not start: {_log_tail(claim.directory)}")
    return hub


def _control_path(directory: Path) -> Path:
    return directory / "control.sock"


def _log_tail(directory: Path) -> str:
    lines = (directory / "hub.log").read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")
