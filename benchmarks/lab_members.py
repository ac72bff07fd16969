"""Member programs in the hosts of a lab, spoken to by lines of JSON: what benchmarks of a network are made of."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.lab.wan.network import WanNetwork
from benchmarks.member_host import OPERATOR_KEY

JOIN_SECONDS = 120
_END_SECONDS = 15


class Member:
    """A member program in one host, spoken to by lines of JSON."""

    def __init__(self, child: asyncio.subprocess.Process, log: Path) -> None:
        self._child = child
        self._log = log

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Raises `RuntimeError` with the member's last words, `TimeoutError`."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(request).encode() + b"\n")
        async with asyncio.timeout(seconds):
            with suppress(ConnectionError):  # it has ended: what it said last is told below
                await self._child.stdin.drain()
            line = await self._child.stdout.readline()
        if not line:
            words = [text for text in self._log.read_text(errors="replace").splitlines() if text.strip()]
            raise RuntimeError(f"a member ended: {words[-1][:200] if words else 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        """By closing its input; it and whatever it left behind in its process group are then killed."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._child.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        await self._child.wait()


@asynccontextmanager
async def members(
    network: WanNetwork, program: str, method: str, directory: Path, python: str = sys.executable
) -> AsyncIterator[list[Member]]:
    """A `program` in every host, told `method`, connected with all others. Raises as `Member.ask`."""
    hosts = network.topology.trainers
    for host in hosts:
        await network.inside(host.name, _keep_congestion_windows)
    Identity.load_or_create(make_private_dir(directory) / OPERATOR_KEY)
    started = []
    try:
        for index, host in enumerate(hosts):
            log = directory / f"{index}.log"
            command = [python, "-W", "ignore", "-m", program]
            command += [method, str(index), str(len(hosts)), network.address(host.name), str(directory)]
            with log.open("wb") as file:
                pipe = asyncio.subprocess.PIPE
                child = await network.exec(host.name, command, stdin=pipe, stdout=pipe, stderr=file)
            started.append(Member(child, log))
        contacts: list[Any] = [None] * len(hosts)
        for index, member in enumerate(started):  # one after another: the first is whom the others ask
            contacts[index] = (await member.ask({"contacts": contacts}, JOIN_SECONDS))["contact"]
        await ask_all(started, {"contacts": contacts}, JOIN_SECONDS)
        yield started
    finally:
        await asyncio.gather(*(member.end() for member in started))


async def ask_all(asked: Sequence[Member], request: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """Ask all at once."""
    return await asyncio.gather(*(member.ask(request, seconds) for member in asked))


def _keep_congestion_windows() -> None:
    """For every method: a connection that was idle between two rounds begins where it stopped (deploy/sysctl.conf)."""
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
