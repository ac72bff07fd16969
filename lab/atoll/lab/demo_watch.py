"""Start a swarm and watch it until it is finished: shared by the demos and the WAN lab."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from atoll.core.errors import DeadlineExceeded
from atoll.lab.launcher import LocalSwarm

READY_TIMEOUT = timedelta(seconds=180)
PAGE_TIMEOUT = timedelta(seconds=2)


@dataclass
class DemoView:
    """State that the live view shows: nodes, loss curve, rounds, faults."""

    title: str = "atoll demo"
    phase: str = "starting"
    started: float = 0.0
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    stop_tokens: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)  # committed tokens, nats per token
    rounds_opened: int = 0
    rounds_committed: int = 0
    page: str = ""
    faults: list[str] = field(default_factory=list)  # injected faults, one sentence each


def fraction_done(view: DemoView) -> float:
    """Return the fraction of the run's tokens that are committed, 0 to 1."""
    committed = max((node.get("committed_tokens", 0) for node in view.nodes.values()), default=0)
    return min(1.0, committed / view.stop_tokens)


async def start(
    swarm: LocalSwarm, spec: str, flags: Mapping[str, Sequence[str]], view: DemoView, show: Callable[[DemoView], None]
) -> dict[str, Any]:
    """Start coordinator, run, seed, and a node per entry of `flags`. Return the coordinator's endpoints."""
    endpoints = await swarm.start_coordinator()
    view.page = endpoints["http"]
    await swarm.create_run(spec)
    view.phase = "starting the seed"
    show(view)
    await swarm.start_member("seed", "seed")
    await swarm.until(lambda: seed_is_registered(swarm), "the seed did not become ready", READY_TIMEOUT)
    view.phase = "starting the nodes (each loads torch and the corpus)"
    show(view)
    for name, words in flags.items():
        await swarm.start_member(name, "node", "--cpu-threads", "1", *words)
    return endpoints


async def watch(
    swarm: LocalSwarm,
    timeout: timedelta,
    names: list[str],
    view: DemoView,
    show: Callable[[DemoView], None],
    faults: asyncio.Task[None],
) -> None:
    """Update the view until all faults are injected and every node is finished. Raises `DeadlineExceeded`."""

    def finished() -> bool:
        states = [view.nodes.get(name, {}).get("state") for name in names]
        return faults.done() and all(state == "finished" for state in states)

    deadline = time.monotonic() + timeout.total_seconds()
    while not finished():
        swarm.check()
        if time.monotonic() > deadline:
            minutes = timeout.total_seconds() / 60
            raise DeadlineExceeded(f"the run did not finish within {minutes:g} min", "allow more time with --minutes")
        for name in names:
            before = view.nodes.get(name, {})
            now = await asyncio.to_thread(swarm.status, name)
            view.nodes[name] = now or (before and {**before, "state": "down"})
        await fetch_run_view(view)
        if any(node.get("state") == "training" for node in view.nodes.values()):
            view.phase = "training"
        show(view)
        await asyncio.sleep(1.0)


async def fetch_run_view(view: DemoView) -> None:
    """Read losses and round counts from the coordinator's status page into the view."""
    try:
        show_runs(await asyncio.to_thread(read_status, view.page), view)
    except OSError:
        return  # the next call reads the page again


def show_runs(status: dict[str, Any], view: DemoView) -> None:
    """Copy losses and round counts from the coordinator's status to the view."""
    for run in status["runs"]:
        view.losses = [(item["committed_tokens"], item["loss"]) for item in run["losses"]]
        view.rounds_opened, view.rounds_committed = run["rounds_opened"], run["rounds_committed"]


def read_status(page: str) -> dict[str, Any]:
    """Read the status of all runs from the coordinator's page. Raises `OSError`."""
    url = page + "api/status"
    with urllib.request.urlopen(url, timeout=PAGE_TIMEOUT.total_seconds()) as answer:  # noqa: S310 - the coordinator's
        result: dict[str, Any] = json.load(answer)
        return result


def seed_is_registered(swarm: LocalSwarm) -> bool:
    """Return whether the seed is ready and connected to the coordinator."""
    status = swarm.status("seed")
    return status is not None and status["state"] == "ready" and status["coordinator_connected"]
