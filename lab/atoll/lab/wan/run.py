"""`atoll lab run`: a complete swarm in the WAN lab, with each program on a host of the topology, until it finishes.

A host's `speed` sets its node's pace: an inner step takes `step_seconds` / `speed`. A node's utilisation is the
fraction of time in which it computed and did not wait for the network: steps × step time / time that it trained.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError, DeadlineExceeded
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.lab.corpus import write_python_corpus
from atoll.lab.demo import sha256_of, spec_toml
from atoll.lab.demo_watch import READY_TIMEOUT, DemoView, read_status, show_runs
from atoll.lab.launcher import LocalSwarm
from atoll.lab.wan.network import WanNetwork, wan_network
from atoll.lab.wan.topology import COORDINATOR, SEED, Host, Topology
from atoll.node.config import has_corpus_files

_LEAST_STEP_SECONDS = 0.2
_STEP_CORE_SECONDS = 0.1  # core time reserved for one node's step, so that the cores are not the limit
_INNER_STEPS = 20

Show = Callable[[DemoView], None]


@dataclass(frozen=True)
class LabRunOptions:
    """Options of `atoll lab run`."""

    topology: Topology
    spec: str | None  # TOML; None: the demo's model and text
    tokens: int  # of the demo's run
    codec: str  # of the demo's run
    step_seconds: float  # at full speed; 0: as fast as this machine allows
    timeout: timedelta  # from the start of the nodes


@dataclass(frozen=True)
class HostResult:
    """Result of one node. Megabytes are of all traffic on its link."""

    name: str
    speed: float
    steps: int
    rounds_committed: int
    utilisation: float
    sent_megabytes: float
    received_megabytes: float
    segments_dropped: int


@dataclass(frozen=True)
class LabRunResult:
    """Result of a lab run."""

    topology: str
    run: str
    tokens: int
    seconds: float  # from the first step to the last
    tokens_per_second: float
    utilisation: float  # mean over hosts
    rounds_opened: int
    rounds_committed: int
    val_loss_first: float
    val_loss_last: float
    anchors_equal: bool
    hosts: tuple[HostResult, ...]
    seed_megabytes: float  # sent by the seed, relayed traffic included
    hub_cpu_share: float  # of one core
    hub_late: int  # times that a packet was delivered more than 2 ms late

    def to_json(self) -> dict[str, Any]:
        """Convert to the object that `atoll lab run --output json` prints."""
        return asdict(self)


@dataclass
class _NodeProgress:
    """Times at which a node was first and last seen training, and its last status."""

    first: float = 0.0
    first_steps: int = 0
    last: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)

    def update(self, status: dict[str, Any] | None, now: float) -> None:
        self.status = status or (self.status and {**self.status, "state": "down"})
        if status is None or not status["steps"]:
            return
        if not self.first:
            self.first, self.first_steps = now, status["steps"]
        if status["state"] != "finished" or not self.last:
            self.last = now

    def utilisation(self, pace: float) -> float:
        seconds = self.last - self.first
        steps = self.status.get("steps", 0) - self.first_steps
        return min(1.0, steps * pace / seconds) if seconds > 0 else 0.0


async def run_lab(options: LabRunOptions, root: Path, show: Show) -> LabRunResult:
    """Build the network, run the swarm below `root`, end both. Raises `ChildDied`, `DeadlineExceeded`, `Lab…`."""
    hosts = options.topology.trainers
    if options.spec is not None:
        check_fits(parse_run_spec(options.spec), options.topology)
    view = DemoView(title=f"atoll lab run {options.topology.name}", started=time.monotonic())
    view.phase = "building the network"
    show(view)
    async with wan_network(options.topology) as network:
        swarm = LocalSwarm(root, network)
        try:
            pace = options.step_seconds or _own_step_seconds(hosts)
            spec = options.spec or _demo_spec(options, root)
            page = await _start(swarm, options.topology, spec, pace, view, show)
            seen = await _watch(swarm, network, options, page, view, show)
            view.phase = "collecting"
            show(view)
            return await _collect(swarm, network, seen, pace)
        finally:
            await swarm.close()


def check_fits(spec: RunSpec, topology: Topology) -> None:
    """Raise `ConfigError` if the run cannot begin in this topology."""
    hosts, wanted = len(topology.trainers), spec.run.min_nodes
    if wanted > hosts:
        raise ConfigError(
            f"run.min_nodes is {wanted}, but {topology.name} has only {hosts} hosts for nodes",
            "lower min_nodes in [run], or choose a larger topology: atoll lab list",
        )
    text = spec.data.path
    if spec.data.source not in ("huggingface", "corpus") and not has_corpus_files(text):
        raise ConfigError(f"no training text at {text}", "change path in [data] of the run spec")


async def _start(swarm: LocalSwarm, topology: Topology, spec: str, pace: float, view: DemoView, show: Show) -> str:
    """Start all programs. Return the URL of the coordinator's page, which only its host can open."""
    run = parse_run_spec(spec).run
    view.stop_tokens = run.stop_tokens
    page: str = (await swarm.start_coordinator())["http"]
    await swarm.create_run(spec)
    view.phase = "starting the seed"
    show(view)
    await swarm.start_member(SEED, "seed")
    await swarm.until(lambda: swarm.in_state(SEED, "ready"), "the seed did not become ready", READY_TIMEOUT)
    view.phase = "starting the nodes (each loads torch and the corpus)"
    show(view)
    for host in topology.trainers:
        flags = ("--cpu-threads", "1", "--minimum-step-seconds", f"{pace / host.speed:g}")
        await swarm.start_member(host.name, "node", *flags)
    return page


async def _watch(
    swarm: LocalSwarm, network: WanNetwork, options: LabRunOptions, page: str, view: DemoView, show: Show
) -> dict[str, _NodeProgress]:
    """Update the view until every node is finished. Raises `DeadlineExceeded`."""
    seen = {host.name: _NodeProgress() for host in options.topology.trainers}

    def finished() -> bool:
        return all(node.status.get("state") == "finished" for node in seen.values())

    deadline = time.monotonic() + options.timeout.total_seconds()
    while not finished():
        swarm.check()
        network.check()
        if time.monotonic() > deadline:
            minutes = options.timeout.total_seconds() / 60
            raise DeadlineExceeded(
                f"the run did not finish within {minutes:g} min of its start", "allow more time with --minutes"
            )
        for name, node in seen.items():
            node.update(await asyncio.to_thread(swarm.status, name), time.monotonic())
            view.nodes[name] = node.status
        with suppress(OSError):  # the next turn reads the page again
            show_runs(await network.inside(COORDINATOR, partial(read_status, page)), view)
        if any(node.status.get("state") == "training" for node in seen.values()):
            view.phase = "training"
        show(view)
        await asyncio.sleep(1.0)
    return seen


async def _collect(swarm: LocalSwarm, network: WanNetwork, seen: dict[str, _NodeProgress], pace: float) -> LabRunResult:
    counters = network.counters()
    name = next(iter(seen.values())).status["run"]
    run = (await swarm.ctl_json("run", "show", name))["run"]
    losses = [item["loss"] for item in sorted(run["evaluations"], key=lambda item: item["round"])]
    anchors = [await asyncio.to_thread(sha256_of, Path(node.status["anchor"])) for node in seen.values()]
    hosts = []
    for host, node in ((network.topology.host(name), node) for name, node in seen.items()):
        link = counters.hosts[host.name]
        hosts.append(
            HostResult(
                name=host.name,
                speed=host.speed,
                steps=node.status["steps"],
                rounds_committed=node.status["rounds_committed"],
                utilisation=round(node.utilisation(max(pace / host.speed, node.status["step_seconds"])), 3),
                sent_megabytes=round(link.sent_bytes / 1e6, 1),
                received_megabytes=round(link.received_bytes / 1e6, 1),
                segments_dropped=sum(link.dropped_segments.values()),
            )
        )
    trained = [node for node in seen.values() if node.first]
    seconds = max((node.last for node in trained), default=0) - min((node.first for node in trained), default=0)
    return LabRunResult(
        topology=network.topology.name,
        run=name,
        tokens=run["committed_tokens"],
        seconds=round(seconds, 1),
        tokens_per_second=round(run["committed_tokens"] / max(seconds, 1e-9), 1),
        utilisation=round(sum(host.utilisation for host in hosts) / len(hosts), 3),
        rounds_opened=run["rounds_opened"],
        rounds_committed=run["rounds_committed"],
        val_loss_first=losses[0] if losses else 0.0,
        val_loss_last=losses[-1] if losses else 0.0,
        anchors_equal=len(set(anchors)) == 1,
        hosts=tuple(hosts),
        seed_megabytes=round(counters.hosts[SEED].sent_bytes / 1e6, 1),
        hub_cpu_share=round(counters.cpu_seconds / counters.seconds, 3),
        hub_late=counters.late,
    )


def _own_step_seconds(hosts: tuple[Host, ...]) -> float:
    return max(_LEAST_STEP_SECONDS, _STEP_CORE_SECONDS * len(hosts) / (os.cpu_count() or 1))


def _demo_spec(options: LabRunOptions, root: Path) -> str:
    corpus = root / "corpus.txt"
    write_python_corpus(corpus)
    hosts = options.topology.trainers
    return spec_toml(
        seed=0,
        nodes=len(hosts),
        tokens=options.tokens,
        corpus=corpus,
        codec=options.codec,
        slowdowns=[1 / host.speed for host in hosts],
        inner_steps=_INNER_STEPS,
    )
