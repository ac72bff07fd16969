"""A route of eight stages, one of which is killed every 30 seconds: what is left of its speed.

    python -m benchmarks.pipeline_faults
    python -m benchmarks.pipeline_faults --seconds 240 --routes 2 --standbys 3

The shipped programs on this machine: a coordinator, a seed and eight nodes, pinned to one route of eight stages, or
to two routes of four, where every layer has a second copy. More nodes can stand by, pinned to the layers of the first
stages. A flush takes `PACE_SECONDS` at least, so that trainers on few cores are not measured by the cores. First
nobody is disturbed. Then, every `EVERY_SECONDS`, a stage gets SIGKILL (its trainer dies with it) and is started again
at once, as a service manager would.

Useful tokens are those that rounds committed. Recovery is the longest pause between two flushes that were seen to be
stepped, from a signal to the next one: by the other stages of the victim's route (`route_s`; where somebody stood by
with its layers: `covered_s`), and by anybody (`swarm_s`). Micro-batches that counted twice are found in the manifests:
tokens of the sums of the first layers beyond the samples that drivers consumed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.lab import demo, demo_watch
from atoll.lab.corpus import write_python_corpus
from atoll.lab.demo import RUN
from atoll.lab.demo_pipeline import SEQUENCE_LENGTH, counted_twice
from atoll.lab.faults import kill
from atoll.lab.launcher import LocalSwarm
from benchmarks.common import Report
from benchmarks.process_swarm import report_on_exit

NODES = 8
PACE_SECONDS = 1.0  # of a flush
EVERY_SECONDS = 30.0
MICRO_BATCHES = 8
_READY = timedelta(seconds=300)
_LOOK_SECONDS = 0.25
_TARGET, _RECOVERY_SECONDS = 0.80, 5.0
_NOTES = (
    f"8 nodes on this machine, {PACE_SECONDS:g} s a flush of {MICRO_BATCHES} × {SEQUENCE_LENGTH} tokens, a SIGKILL "
    f"every {EVERY_SECONDS:g} s, started again at once; share: useful tokens/s of those in peace, in the same swarm"
)

SPEC = """version = 1
[run]
name = "{name}"
min_nodes = 8
stop_tokens = 1000000000
[model]
preset = "nano"
dimension = 64
layers = 6
heads = 4
kv_heads = 4
hidden_dimension = 192
[data]
path = {corpus}
sequence_length = {sequence_length}
validation_samples = 4
[optimizer]
micro_batch_samples = 1
[pipeline]
micro_batches = {micro_batches}
[sync]
round_tokens = {round_tokens}
round_growth = 1000000.0
round_max_seconds = 60
codec = "int8"
outer_warmup_tokens = 1000000000
"""


@dataclass
class SwarmMonitor:
    """What the swarm showed: looks at all nodes and at the run."""

    swarm: LocalSwarm
    names: Sequence[str]
    stepped: dict[str, list[float]] = field(default_factory=dict)  # by name, when it had stepped a flush
    committed: list[tuple[float, int]] = field(default_factory=list)  # when tokens were seen to be committed
    now: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: what each that answers says of itself
    repeated: int = 0  # samples that were read again, as no others were dealt out yet
    _steps: dict[str, int] = field(default_factory=dict)
    _repeated: dict[str, int] = field(default_factory=dict)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            told = await asyncio.gather(*(asyncio.to_thread(self.swarm.status, name) for name in self.names))
            now = time.monotonic()
            self.now = {name: status for name, status in zip(self.names, told, strict=True) if status}
            for name, status in self.now.items():
                before, self._steps[name] = self._steps.get(name, 0), status["steps"]
                if status["steps"] > before:
                    self.stepped.setdefault(name, []).append(now)
                again = status["samples_repeated"] - self._repeated.get(name, 0)
                self._repeated[name] = status["samples_repeated"]
                self.repeated += again if again >= 0 else status["samples_repeated"]  # another trainer counts anew
            tokens = max((status.get("committed_tokens", 0) for status in self.now.values()), default=0)
            if tokens > (self.committed[-1][1] if self.committed else 0):
                self.committed.append((now, tokens))
            await asyncio.sleep(_LOOK_SECONDS)

    def ready(self, stages: int, standbys: int) -> bool:
        """Whether so many stand on routes that work, and so many stand by."""
        there = [status for status in self.now.values() if status["route_ready"]]
        return len(there) == stages and len(self.standby_spans()) == standbys

    def standby_spans(self) -> dict[str, tuple[int, ...]]:
        """Who stands by, with which layers."""
        told = {name: status for name, status in self.now.items() if "stands by" in status["detail"]}
        return {name: tuple(status["layers"]) for name, status in told.items() if status["layers"]}

    def route_of(self, name: str) -> list[str]:
        """All stages of its route."""
        return [other for other, it in self.now.items() if it["route"] == self.now[name]["route"]]

    def pause(self, names: Iterable[str], began: float, ended: float) -> float:
        """The longest time in which none of these was seen to step."""
        inside = sorted(moment for name in names for moment in self.stepped.get(name, ()) if began < moment < ended)
        return max(after - before for before, after in pairwise((began, *inside, ended)))

    def rate(self, began: float, ended: float) -> float:
        """Useful tokens per second, from the first commit in the time to its end."""
        inside = [item for item in self.committed if began <= item[0] <= ended]
        if len(inside) < 2:
            return 0.0
        return (inside[-1][1] - inside[0][1]) / (ended - inside[0][0])


@dataclass(frozen=True)
class Kill:
    """One stage's."""

    at: float
    others: tuple[str, ...]  # of its route
    covered: bool  # somebody stood by with its layers


async def kill_stages(monitor: SwarmMonitor, seconds: float, rng: random.Random) -> list[Kill]:
    """Stages of routes that work, at random."""
    done: list[Kill] = []
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        stages = [name for name, status in monitor.now.items() if status["route_ready"]]
        if stages:
            name = rng.choice(sorted(stages))
            others = tuple(other for other in monitor.route_of(name) if other != name)
            covered = tuple(monitor.now[name]["layers"]) in monitor.standby_spans().values()
            done.append(Kill(time.monotonic(), others, covered))
            await kill(monitor.swarm, name)
            await monitor.swarm.restart_member(name)
        await asyncio.sleep(max(1.0, began + EVERY_SECONDS * len(done) - time.monotonic()))
    return done


async def measure(count: int, standbys: int, peace_seconds: float, seconds: float, root: Path, report: Report) -> None:
    """One swarm. Raises what the launcher raises."""
    length = NODES // count
    routes = [[f"node-{number * length + stage + 1}" for stage in range(length)] for number in range(count)]
    spans = {name: (stage * count, stage * count + count - 1) for route in routes for stage, name in enumerate(route)}
    spans |= {f"spare-{number}": spans[routes[0][number]] for number in range(standbys)}
    corpus = root / "corpus.txt"
    write_python_corpus(corpus, 1 << 20)
    swarm = LocalSwarm(root)
    view = demo_watch.DemoView(title="pipeline_faults", started=time.monotonic(), stop_tokens=10**9)
    text = SPEC.format(
        name=RUN,
        corpus=json.dumps(str(corpus)),
        sequence_length=SEQUENCE_LENGTH,
        micro_batches=MICRO_BATCHES,
        round_tokens=8 * count * MICRO_BATCHES * SEQUENCE_LENGTH,
    )
    try:
        flags = dict.fromkeys(spans, ("--minimum-step-seconds", str(PACE_SECONDS)))
        await demo_watch.start(swarm, text, flags, view, lambda _: None)
        for name, (first, last) in spans.items():
            async with asyncio.timeout(_READY.total_seconds()):
                while name not in await swarm.ctl("node", "list"):  # noqa: ASYNC110 - another process decides it
                    await asyncio.sleep(0.5)
            await swarm.ctl("plan", "pin", name, "--layers", f"{first}-{last}")
        monitor = SwarmMonitor(swarm, list(spans))
        watching = asyncio.create_task(monitor.run())
        try:
            await swarm.until(
                lambda: monitor.ready(NODES, standbys) and len(monitor.committed) >= 3,
                "the routes do not train",
                _READY,
            )
            peace = time.monotonic()
            await asyncio.sleep(peace_seconds)
            began = time.monotonic()
            kills = await kill_stages(monitor, seconds, random.Random(7))
            ended = time.monotonic()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        await swarm.close()
    known = {}
    for name in spans:
        directory = root / name / "runs" / RUN / "manifests"
        if directory.exists():
            known.update(demo.chain_of(directory))
    add(
        report,
        f"{count} × {length}" + (f" + {standbys}" if standbys else ""),
        monitor,
        kills,
        monitor.rate(peace, began),
        monitor.rate(began, ended),
        ended,
        counted_twice(known),
    )


def add(
    report: Report,
    name: str,
    monitor: SwarmMonitor,
    kills: list[Kill],
    peace: float,
    rate: float,
    ended: float,
    twice: int,
) -> None:
    """One row."""
    ends = [*(it.at for it in kills[1:]), ended]
    route_s = [monitor.pause(it.others, it.at, end) for it, end in zip(kills, ends, strict=True)]
    swarm_s = [monitor.pause(monitor.names, it.at, end) for it, end in zip(kills, ends, strict=True)]
    covered_s = [seconds for it, seconds in zip(kills, route_s, strict=True) if it.covered]
    report.cell(
        routes=name,
        kills=len(kills),
        covered=len(covered_s),
        peace_tokens_per_s=peace,
        tokens_per_s=rate,
        share=rate / peace if peace else 0.0,
        route_s=statistics.median(route_s),
        route_worst_s=max(route_s),
        covered_s=statistics.median(covered_s) if covered_s else None,
        covered_worst_s=max(covered_s, default=None),
        swarm_s=statistics.median(swarm_s),
        swarm_worst_s=max(swarm_s),
        counted_twice=twice,
    )
    print(json.dumps(report.cells[-1]), flush=True)


def judge(report: Report) -> None:
    """The acceptance rows."""
    for cell in report.cells:
        name = cell["routes"]
        report.accept(
            f"useful tokens/s of those in peace, {name}",
            target=f"≥ {_TARGET:.2f}",
            value=cell["share"],
            holds=cell["share"] >= _TARGET,
        )
        report.accept(
            f"micro-batches counted twice, {name}",
            target="0",
            value=cell["counted_twice"],
            holds=cell["counted_twice"] == 0 and cell["tokens_per_s"] > 0,
        )
        if cell["covered"]:
            report.accept(
                f"longest pause of a route in which somebody stood by, worst, {name}",
                target=f"≤ {_RECOVERY_SECONDS:g}",
                value=cell["covered_worst_s"],
                holds=cell["covered_worst_s"] <= _RECOVERY_SECONDS,
            )
        if not name.startswith("1 "):
            report.accept(
                f"longest pause of all routes together, {name}",
                target=f"≤ {_RECOVERY_SECONDS:g}",
                value=cell["swarm_worst_s"],
                holds=cell["swarm_worst_s"] <= _RECOVERY_SECONDS,
            )
            report.accept(
                f"longest pause of the victim's own route, median, {name}",
                target=f"≤ {_RECOVERY_SECONDS:g}",
                value=cell["route_s"],
                holds=cell["route_s"] <= _RECOVERY_SECONDS,
            )


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of kills, for each number of routes")
    parser.add_argument("--peace", type=float, default=120.0, help="seconds without any, before")
    parser.add_argument("--routes", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--standbys", type=int, choices=range(NODES // 2), default=0, help="nodes that stand by, too")
    parser.add_argument("--name", default="pipeline_faults", help="of the result's file")
    chosen = parser.parse_args()
    report = Report(chosen.name)
    with report_on_exit(report, _NOTES):
        for count in chosen.routes:
            with tempfile.TemporaryDirectory(prefix="atoll-") as scratch:
                asyncio.run(measure(count, chosen.standbys, chosen.peace, chosen.seconds, Path(scratch), report))
        judge(report)


if __name__ == "__main__":
    main()
