"""Launcher of a swarm on this machine: starts the shipped programs with flags that an operator could type.

Every program is a separate process in its own process group, and ends when the launcher ends. `LocalSwarm.close` sends
SIGTERM and, after a grace, SIGKILL, so that no process remains.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from atoll.core.errors import AtollError, ChildDied, DeadlineExceeded, Unreachable
from atoll.core.files import make_private_dir, write_private
from atoll.node.control.local_client import call
from atoll.node.system import child_processes

START_TIMEOUT = timedelta(seconds=180)
STOP_GRACE = timedelta(seconds=60)  # the last node may first wait for a round that cannot happen, before it saves
COMMAND_TIMEOUT = timedelta(seconds=120)
_POLL_SECONDS = 0.1


@dataclass
class Program:
    """A program that the launcher started."""

    name: str
    directory: Path
    child: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        """Process id of the program itself, because the trampoline execs it."""
        return self.child.pid

    def check(self) -> None:
        """Raise `ChildDied` with the end of its log if the program ended."""
        if self.child.returncode is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise ChildDied(f"{self.name} ended with exit code {self.child.returncode}:\n{tail}")


class ProgramHosts(Protocol):
    """Hosts for programs. A program's name is also its host's name."""

    def address(self, host: str) -> str:
        """Return the address on which a program on `host` listens."""
        ...

    def command(self, host: str, command: Sequence[str | Path]) -> list[str]:
        """Wrap `command` so that it runs on `host`."""
        ...


class LoopbackHosts:
    """Runs all programs on this machine's loopback address."""

    def address(self, host: str) -> str:
        return "127.0.0.1"

    def command(self, host: str, command: Sequence[str | Path]) -> list[str]:
        return [str(word) for word in command]


@dataclass
class LocalSwarm:
    """A coordinator, a seed and nodes on this machine, with their directories below `root`."""

    root: Path
    program_hosts: ProgramHosts = field(default_factory=LoopbackHosts)
    programs: dict[str, Program] = field(default_factory=dict)

    # --- starting ------------------------------------------------------------------------------------

    async def start_coordinator(self, *flags: str) -> dict[str, Any]:
        """Start the coordinator and wait until it listens. Return its endpoints."""
        directory = make_private_dir(self.root / "coordinator")
        endpoints = directory / "endpoints.json"
        endpoints.unlink(missing_ok=True)
        ports = () if "--enrol-port" in flags else ("--enrol-port", "0", "--member-port", "0", "--http-port", "0")
        command = [_script("atoll-coordinator"), "serve", "--data-dir", str(directory)]
        command += ["--listen", self.program_hosts.address("coordinator")]
        await self._start("coordinator", directory, [*command, *ports, *flags])
        await self.until(endpoints.exists, "the coordinator did not start to listen", START_TIMEOUT)
        result: dict[str, Any] = json.loads(endpoints.read_text())
        return result

    async def create_run(self, spec_toml: str) -> None:
        """Register the run and start it."""
        path = self.root / "run.toml"
        path.write_text(spec_toml)
        await self.ctl("run", "create", str(path), "--start")

    async def start_member(self, name: str, role: str = "node", *flags: str) -> Program:
        """Create a token, store it as a private file, and join with it."""
        token = (await self.ctl("token", "create", "--uses", "1", "--role", role)).strip()
        directory = make_private_dir(self.root / name)
        write_private(directory / "token", token.encode())
        command = [_script("atoll"), "join", "--yes", "--name", name, "--data-dir", str(directory)]
        command += ["--token", f"file:{directory / 'token'}", "--listen", self.program_hosts.address(name)]
        command += ["--log-format", "console"]
        return await self._start(name, directory, [*command, *flags])

    async def restart_member(self, name: str) -> Program:
        """Start a member that joined earlier, as its owner would after a reboot."""
        directory = self.root / name
        return await self._start(name, directory, [_script("atoll"), "up", "--data-dir", str(directory)])

    async def start_program(self, name: str, directory: Path, script: str, *arguments: str) -> Program:
        """Start a console script of atoll with any arguments."""
        return await self._start(name, directory, [_script(script), *arguments])

    async def ctl(self, *arguments: str) -> str:
        """Run `atollctl` as the operator and return its output. Raises `AtollError` with its message."""
        return await self.command("atollctl", *arguments)

    async def ctl_json(self, *arguments: str) -> dict[str, Any]:
        """Run `atollctl … --output json` and return the parsed output. Raises `AtollError`."""
        result: dict[str, Any] = json.loads(await self.ctl(*arguments, "--output", "json"))
        return result

    async def command(self, script: str, *arguments: str) -> str:
        """Run a console script to its end with the operator's credentials. Returns and raises like `ctl`."""
        child = await child_processes.start(
            self.program_hosts.command("coordinator", [_script(script), *arguments]),
            environment={**os.environ, "ATOLL_CREDENTIALS": str(self.root / "coordinator" / "admin")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(COMMAND_TIMEOUT.total_seconds()):
            printed, problems = await child.communicate()
        if child.returncode:
            raise AtollError(f"{script} {' '.join(arguments)} failed: {problems.decode().strip()}")
        return printed.decode()

    async def _start(self, name: str, directory: Path, command: Sequence[str]) -> Program:
        log = directory / "log"
        with log.open("ab") as output:
            inside = self.program_hosts.command(name, command)
            child = await child_processes.start(inside, environment=dict(os.environ), stdout=output, stderr=output)
        self.programs[name] = Program(name, directory, child, log)
        return self.programs[name]

    # --- watching ------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], problem: str, timeout: timedelta) -> None:
        """Wait for `condition`. Raises `DeadlineExceeded`, or `ChildDied` if a program ends before that."""
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while not condition():
                    self.check()
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{problem} within {timeout.total_seconds():.0f} s") from error

    def check(self) -> None:
        """Raise `ChildDied` if any program ended without an order to do so."""
        for program in self.programs.values():
            program.check()

    def status(self, name: str) -> dict[str, Any] | None:
        """Return the status from a member's local API; None if it does not answer."""
        try:
            return call(self.root / name, "status", timedelta(seconds=2))
        except Unreachable:
            return None

    def in_state(self, name: str, *states: str) -> bool:
        """Return whether the member reports one of these states."""
        status = self.status(name)
        return status is not None and status["state"] in states

    # --- ending --------------------------------------------------------------------------------------

    async def stop(self, *names: str) -> None:
        """Stop these programs at the same time."""
        programs = [self.programs.pop(name) for name in names]
        await asyncio.gather(*(child_processes.stop(program.child, STOP_GRACE) for program in programs))

    async def close(self) -> None:
        """Stop all programs; nodes first, so that they can announce their leave."""
        nodes = [name for name in self.programs if name not in ("coordinator", "seed")]
        for names in (nodes, ["seed"], ["coordinator"]):
            await self.stop(*(name for name in names if name in self.programs))


def _script(name: str) -> str:
    """Return the path of a console script in this Python environment."""
    return str(Path(sys.executable).parent / name)
