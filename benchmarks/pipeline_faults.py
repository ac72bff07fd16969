"""A route of eight stages, one of which is killed every 30 seconds: what is left of its speed.

    python -m benchmarks.pipeline_faults
    python -m benchmarks.pipeline_faults --seconds 240 --routes 1

The shipped programs on this machine: a coordinator, a seed and eight nodes, pinned to one route of eight stages, or
to two routes of four, where every layer has a second copy. A flush takes `PACE_SECONDS` at least, so that eight
trainers on few cores are not measured by the cores. First nobody is disturbed. Then, every `EVERY_SECONDS`, another
node gets SIGKILL (its trainer dies with it) and is started again at once, as a service manager would.

Useful tokens are those that rounds committed. Recovery is the longest pause between two flushes that were seen to be
stepped, from a signal to the next one: on the route of the victim (`route_s`), and of all routes (`swarm_s`).
Micro-batches that counted twice are found in the manifests: tokens of the sums of the first layers beyond the
samples that drivers consumed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from atoll.node.lab import demo
from atoll.node.lab.corpus import write_python_corpus
from atoll.node.lab.demo import RUN
from atoll.node.lab.demo_pipeline import SEQUENCE_LENGTH, counted_twice
from atoll.node.lab.launcher import LocalSwarm
from atoll.node.lab.trouble import kill
from benchmarks.common import Report
from benchmarks.swarm_lab import reported

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
class Watched:
    """What the swarm showed: looks at all nodes and at the run."""

    swarm: LocalSwarm
    routes: Sequence[Sequence[str]]
    stepped: dict[int, list[float]] = field(default_factory=dict)  # by route, when a stage of it had stepped a flush
    committed: list[tuple[float, int]] = field(default_factory=list)  # when tokens were seen to be committed
    ready: bool = False
    _steps: dict[str, int] = field(default_factory=dict)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            statuses = await asyncio.gather(
                *(asyncio.to_thread(self.swarm.status, name) for route in self.routes for name in (route[0], route[1]))
            )
            now = time.monotonic()
            for number, route in enumerate(self.routes):
                for name, status in zip(route[:2], statuses[2 * number : 2 * number + 2], strict=True):
                    self._look(number, name, status["steps"] if status else 0, now)
            tokens = max((it.get("committed_tokens", 0) for it in statuses if it), default=0)
            if tokens > (self.committed[-1][1] if self.committed else 0):
                self.committed.append((now, tokens))
            self.ready = all(it is not None and it["route_ready"] for it in statuses)
            await asyncio.sleep(_LOOK_SECONDS)

    def _look(self, route: int, name: str, steps: int, now: float) -> None:
        before = self._steps.get(name, 0)
        self._steps[name] = steps
        if steps > before > 0 or (steps > 0 and before == 0):
            self.stepped.setdefault(route, []).append(now)

    def pause(self, route: int | None, began: float, ended: float) -> float:
        """The longest time in which no stage of the route, or of any, was seen to step."""
        found = (moments for number, moments in self.stepped.items() if route in (None, number))
        inside = sorted(moment for moments in found for moment in moments if began < moment < ended)
        return max(after - before for before, after in pairwise((began, *inside, ended)))

    def rate(self, began: float, ended: float) -> float:
        """Useful tokens per second, from the first commit in the time to its end."""
        inside = [item for item in self.committed if began <= item[0] <= ended]
        if len(inside) < 2:
            return 0.0
        return (inside[-1][1] - inside[0][1]) / (ended - inside[0][0])


@dataclass(frozen=True)
class Kill:
    """One node's."""

    at: float
    route: int


async def disturb(swarm: LocalSwarm, routes: Sequence[Sequence[str]], seconds: float, rng: random.Random) -> list[Kill]:
    """All nodes in turn, in an order that changes."""
    done: list[Kill] = []
    began = time.monotonic()
    order: list[tuple[int, str]] = []
    while time.monotonic() < began + seconds:
        if not order:
            order = [(number, name) for number, route in enumerate(routes) for name in route]
            rng.shuffle(order)
        number, name = order.pop()
        done.append(Kill(time.monotonic(), number))
        await kill(swarm, name)
        await swarm.restart_member(name)
        await asyncio.sleep(max(0.0, began + EVERY_SECONDS * len(done) - time.monotonic()))
    return done


async def measure(count: int, peace_seconds: float, seconds: float, root: Path, report: Report) -> None:
    """One swarm. Raises what the launcher raises."""
    length = NODES // count
    routes = [[f"node-{number * length + stage + 1}" for stage in range(length)] for number in range(count)]
    spans = {name: (stage * count, stage * count + count - 1) for route in routes for stage, name in enumerate(route)}
    corpus = root / "corpus.txt"
    write_python_corpus(corpus, 1 << 20)
    swarm = LocalSwarm(root)
    view = demo.DemoView(title="pipeline_faults", started=time.monotonic(), stop_tokens=10**9)
    text = SPEC.format(
        name=RUN,
        corpus=json.dumps(str(corpus)),
        sequence_length=SEQUENCE_LENGTH,
        micro_batches=MICRO_BATCHES,
        round_tokens=8 * count * MICRO_BATCHES * SEQUENCE_LENGTH,
    )
    try:
        flags = dict.fromkeys(spans, ("--minimum-step-seconds", str(PACE_SECONDS)))
        await demo.start(swarm, text, flags, view, lambda _: None)
        for name, (first, last) in spans.items():
            async with asyncio.timeout(_READY.total_seconds()):
                while name not in await swarm.ctl("node", "list"):  # noqa: ASYNC110 - another process decides it
                    await asyncio.sleep(0.5)
            await swarm.ctl("plan", "pin", name, "--layers", f"{first}-{last}")
        watched = Watched(swarm, routes)
        watching = asyncio.create_task(watched.run())
        try:
            await swarm.until(lambda: watched.ready and len(watched.committed) >= 3, "the routes do not train", _READY)
            peace = time.monotonic()
            await asyncio.sleep(peace_seconds)
            began = time.monotonic()
            kills = await disturb(swarm, routes, seconds, random.Random(7))
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
        count,
        watched,
        kills,
        watched.rate(peace, began),
        watched.rate(began, ended),
        ended,
        counted_twice(known),
    )


def add(
    report: Report, count: int, watched: Watched, kills: list[Kill], peace: float, rate: float, ended: float, twice: int
) -> None:
    """One row."""
    ends = [*(it.at for it in kills[1:]), ended]
    route_s = [watched.pause(it.route, it.at, end) for it, end in zip(kills, ends, strict=True)]
    swarm_s = [watched.pause(None, it.at, end) for it, end in zip(kills, ends, strict=True)]
    report.cell(
        routes=f"{count} × {NODES // count}",
        kills=len(kills),
        peace_tokens_per_s=peace,
        tokens_per_s=rate,
        share=rate / peace if peace else 0.0,
        route_s=statistics.median(route_s),
        route_worst_s=max(route_s),
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
    parser.add_argument("--name", default="pipeline_faults", help="of the result's file")
    chosen = parser.parse_args()
    report = Report(chosen.name)
    with reported(report, _NOTES):
        for count in chosen.routes:
            with tempfile.TemporaryDirectory(prefix="atoll-") as scratch:
                asyncio.run(measure(count, chosen.peace, chosen.seconds, Path(scratch), report))
        judge(report)


if __name__ == "__main__":
    main()
