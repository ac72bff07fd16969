"""Tests that build a WAN: what they need, a small topology, and probes that run inside its hosts."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.lab.wan import namespaces, probe
from atoll.lab.wan.network import WanNetwork
from atoll.lab.wan.topology import Topology, parse_topology
from atoll.node.system import child_processes

_problem = namespaces.why_unavailable()
needs_wan = (
    pytest.mark.wan,
    pytest.mark.skipif(_problem is not None, reason=f"WAN lab: {_problem}; {getattr(_problem, 'remedy', '')}"),
)
PROBE = [sys.executable, "-I", "-S", str(Path(probe.__file__))]
_DEADLINE_SECONDS = 180
PINGS, PING_TRIES = 10, 3


def small(hosts: int = 2, rtt_ms: float = 20, **values: object) -> Topology:
    """Hosts `h0`, `h1`… of one region, all alike: 50 Mbit/s unless `values` says otherwise."""
    return parse_topology(parts(hosts, rtt_ms, **values), "small")


def parts(hosts: int = 2, rtt_ms: float = 20, **values: object) -> str:
    """The file of `small`."""
    merged = {"uplink_mbit": 50, "downlink_mbit": 50, **values}
    text = "[defaults]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in merged.items())
    text += '[public]\nregion = "here"\n[[route]]\nbetween = ["here", "here"]\n' + f"rtt_ms = {rtt_ms}\n"
    text += "".join(f'[[host]]\nname = "h{number}"\nregion = "here"\n' for number in range(hosts))
    return text


@asynccontextmanager
async def serving(network: WanNetwork, *hosts: str):
    """A probe's server on port 5000 of each host."""
    servers = []
    try:
        for host in hosts:
            server = await network.exec(host, [*PROBE, "serve", "5000"], stdout=asyncio.subprocess.PIPE)
            servers.append(server)
            assert await asyncio.wait_for(server.stdout.readline(), _DEADLINE_SECONDS)
        yield
    finally:
        for server in servers:
            await child_processes.stop(server, namespaces.COMMAND_TIMEOUT)


async def ask(network: WanNetwork, host: str, peer: str, **request: object) -> dict:
    """One measurement of the probe on `host` against `peer`."""
    document = {"address": network.addresses[peer], "port": 5000, **request}
    printed = await output(network, host, *PROBE, "ask", json.dumps(document))
    return json.loads(printed)


async def output(network: WanNetwork, host: str, *command: str) -> str:
    """What a program on `host` prints; it must end well."""
    child = await network.exec(host, command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await asyncio.wait_for(child.communicate(), _DEADLINE_SECONDS)
    assert child.returncode == 0
    return printed.decode()


async def reaches(network: WanNetwork, host: str, peer: str) -> bool:
    """Whether datagrams come back. They are late, as if they were lost, where a program stops for a moment."""
    for _ in range(PING_TRIES):
        found = await ask(network, host, peer, task="ping", count=PINGS, interval=0.01)
        if not found["lost"]:
            return True
    assert found["lost"] == PINGS
    return False
