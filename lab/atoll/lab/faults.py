"""Fault injection for a swarm on this machine: kills, freezes and restarts of programs, at times drawn from a seed.

A kill sends SIGKILL to the program only; the kernel ends its children. A freeze sends SIGSTOP to the program and all
its children, like a laptop that sleeps. Every killed program is started again, every frozen one resumed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from atoll.lab.launcher import LocalSwarm

FREEZE_SECONDS = 20.0
RESTART_DELAY_SECONDS = 5.0  # after a single kill
GROUP_DOWN_SECONDS = 30.0  # after a group kill: long enough for the other nodes to continue without the group
_FROM, _TO = 0.12, 0.7  # fraction of the run's tokens within which faults happen


@dataclass(frozen=True)
class FaultPlan:
    """Number and kinds of faults to inject."""

    kills: int = 0
    all_at_once: bool = False  # all kills at the same time
    freezes: int = 0
    kill_coordinator: bool = False


NO_FAULTS = FaultPlan()


@dataclass
class FaultLog:
    """Faults that were injected."""

    killed: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    coordinator_restarts: int = 0
    events: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Event:
    at: float  # fraction of the run's tokens
    kind: str
    victims: tuple[str, ...]


class FaultInjector:
    """Injects the faults of a plan while the run trains."""

    def __init__(
        self, swarm: LocalSwarm, plan: FaultPlan, names: list[str], seed: int, endpoints: dict[str, Any]
    ) -> None:
        self.log = FaultLog()
        self._swarm = swarm
        self._plan = plan
        self._endpoints = endpoints
        self._events = _schedule(plan, names, random.Random(seed))

    async def run(self, share: Callable[[], float]) -> None:
        """Inject all faults and return when the last victim runs again. `share` returns the run's progress, 0 to 1."""
        while self._events:
            if share() < self._events[0].at:
                await asyncio.sleep(0.2)
                continue
            event = self._events[0]
            self.log.events.append(f"{event.kind} {', '.join(event.victims)} at {share():.0%}")
            match event.kind:
                case "freeze":
                    await self._freeze(event.victims[0])
                case _:
                    await self._kill(event.victims)
            self._events.pop(0)

    async def _freeze(self, name: str) -> None:
        self.log.frozen.append(name)
        with frozen(self._swarm, name):
            await asyncio.sleep(FREEZE_SECONDS)
        self.log.events.append(f"resume {name}")

    async def _kill(self, victims: tuple[str, ...]) -> None:
        await kill(self._swarm, *victims)
        await asyncio.sleep(
            GROUP_DOWN_SECONDS if len(victims) > 1 and self._plan.all_at_once else RESTART_DELAY_SECONDS
        )
        for name in sorted(victims):  # the coordinator first
            if name == "coordinator":
                await self._swarm.start_coordinator(*same_ports(self._endpoints))
                self.log.coordinator_restarts += 1
            else:
                await self._swarm.restart_member(name)
                self.log.killed.append(name)
            self.log.events.append(f"restart {name}")


async def kill(swarm: LocalSwarm, *names: str) -> None:
    """Send SIGKILL to these programs at the same time and forget them. Their children end with them."""
    programs = [swarm.programs.pop(name) for name in names]
    for program in programs:
        if program.child.returncode is None:
            os.kill(program.pid, signal.SIGKILL)
    await asyncio.gather(*(program.child.wait() for program in programs))


@contextmanager
def frozen(swarm: LocalSwarm, name: str, *, whole: bool = True) -> Iterator[None]:
    """Suspend a program and its descendants; if not `whole`, only the daemon, so that p2pd keeps its streams."""
    daemon = psutil.Process(swarm.programs[name].pid)
    daemon.suspend()  # first, so that it starts no more children
    stopped = [daemon]
    try:
        for process in daemon.children(recursive=True) if whole else []:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                stopped.append(process)
        yield
    finally:
        for process in reversed(stopped):
            with suppress(psutil.NoSuchProcess):  # it was killed before
                process.resume()


def same_ports(endpoints: dict[str, Any]) -> list[str]:
    """Return the flags that make a restarted coordinator listen on its earlier ports."""
    http = endpoints["http"].rstrip("/").rpartition(":")[2]
    enrol, member = (endpoints[name].rpartition(":")[2] for name in ("enrolment", "membership"))
    return ["--enrol-port", enrol, "--member-port", member, "--http-port", http]


def _schedule(plan: FaultPlan, names: list[str], rng: random.Random) -> list[_Event]:
    """Draw victims and times. A node is a victim again only after every other node was one."""
    victims = rng.sample(names, len(names)) * (1 + (plan.kills + plan.freezes) // len(names))
    if plan.all_at_once:
        struck = tuple(victims[: plan.kills]) + (("coordinator",) if plan.kill_coordinator else ())
        kinds = [("kill", struck)]
    else:
        kinds = [("kill", (victims[i],)) for i in range(plan.kills)]
        kinds += [("kill", ("coordinator",))] if plan.kill_coordinator else []
    kinds += [("freeze", (victims[plan.kills + i],)) for i in range(plan.freezes)]
    rng.shuffle(kinds)
    width = (_TO - _FROM) / max(1, len(kinds))
    return [_Event(_FROM + (i + rng.random() * 0.8) * width, kind, struck) for i, (kind, struck) in enumerate(kinds)]
