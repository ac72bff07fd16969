"""A stage that is gone, whose layers a neighbour on its route has, too, or has not: how long the route stands still.

    python -m benchmarks.second_copies
    python -m benchmarks.second_copies --away 0 --without

The shipped programs on this machine: a coordinator, a seed, and three nodes that make one route, whose memory is
limited so that each has room for the layers of two, and none for all. When a neighbour has a second copy of a stage's
layers, that stage gets SIGKILL (its trainer dies with it) and is started again after a while (`--away`). The next one
is killed when all three are back in their places, where pins put them for a moment, and there are copies. Then the
same, less often, in a run that wants no second copies (with `--without` only that).

`pause_s` is the longest time between two flushes that the other stages were seen to step, in `WATCHED_SECONDS` from the
signal on. Part of it is the time from the signal to the plan (`plan_s`), which waits a second for a line that may only
have blinked; in the rest the neighbour loads a trainer with both spans. Micro-batches that counted twice are those of
`pipeline_faults`, but for samples that a driver read again, and counted as such (`samples_repeated`), because its
ranges ran dry before the next manifest dealt out more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from atoll.lab import demo, demo_watch
from atoll.lab.corpus import write_python_corpus
from atoll.lab.demo import RUN
from atoll.lab.demo_pipeline import SEQUENCE_LENGTH, counted_twice
from atoll.lab.faults import kill
from atoll.lab.launcher import LocalSwarm
from benchmarks.common import Report
from benchmarks.pipeline_faults import MICRO_BATCHES, PACE_SECONDS, SwarmMonitor
from benchmarks.process_swarm import report_on_exit

SPANS = {"node-1": "0-2", "node-2": "3-5", "node-3": "6-9"}
MEGABYTES = "211"
WATCHED_SECONDS = 45.0
_FEWER = 3  # times as many kills with copies as without
_READY = timedelta(seconds=300)
_TARGET_SECONDS = 5.0
_NOTES = (
    f"three nodes on this machine, {PACE_SECONDS:g} s a flush of {MICRO_BATCHES} × {SEQUENCE_LENGTH} tokens, "
    "a stage gets SIGKILL and is started again after `away` seconds"
)

SPEC = """version = 1
[run]
name = "{name}"
min_nodes = 3
stop_tokens = 1000000000
[model]
preset = "nano"
dimension = 256
layers = 8
heads = 4
kv_heads = 4
hidden_dimension = 768
[data]
path = {corpus}
sequence_length = {sequence_length}
validation_samples = 4
[optimizer]
micro_batch_samples = 1
[pipeline]
micro_batches = {micro_batches}
second_copies = {second_copies}
[sync]
round_tokens = {round_tokens}
round_growth = 1000000.0
round_max_seconds = 60
codec = "int8"
outer_warmup_tokens = 1000000000
"""


async def copied(swarm: LocalSwarm) -> list[str]:
    """Stages whose layers a neighbour has, too, by name."""
    nodes = json.loads(await swarm.ctl("plan", "show", "--output", "json"))["nodes"]
    spans = [span for node in nodes for span in node["copies"]]
    return sorted(node["name"] for node in nodes if node["route"] and node["span"] in spans)


async def begin(swarm: LocalSwarm, root: Path, *, copies: bool) -> None:
    """The route, pinned until it trains. Raises what the launcher raises."""
    corpus = root / "corpus.txt"
    write_python_corpus(corpus, 1 << 20)
    view = demo_watch.DemoView(title="second_copies", started=time.monotonic(), stop_tokens=10**9)
    text = SPEC.format(
        name=RUN,
        corpus=json.dumps(str(corpus)),
        sequence_length=SEQUENCE_LENGTH,
        micro_batches=MICRO_BATCHES,
        second_copies=str(copies).lower(),
        round_tokens=8 * MICRO_BATCHES * SEQUENCE_LENGTH,
    )
    flags = ("--minimum-step-seconds", str(PACE_SECONDS), "--memory-megabytes", MEGABYTES)
    await demo_watch.start(swarm, text, dict.fromkeys(SPANS, flags), view, lambda _: None)
    for name, span in SPANS.items():
        async with asyncio.timeout(_READY.total_seconds()):
            while name not in await swarm.ctl("node", "list"):  # noqa: ASYNC110 - another process decides it
                await asyncio.sleep(0.5)
        await swarm.ctl("plan", "pin", name, "--layers", span)


async def settle(monitor: SwarmMonitor, *, copies: bool) -> None:
    """All three in their places, and free to have others."""
    swarm = monitor.swarm
    for name, span in SPANS.items():
        await swarm.ctl("plan", "pin", name, "--layers", span)
    await swarm.until(lambda: monitor.ready(len(SPANS), 0), "the route does not train", _READY)
    for name in SPANS:
        await swarm.ctl("plan", "unpin", name)
    async with asyncio.timeout(_READY.total_seconds()):
        while copies and not await copied(swarm):  # noqa: ASYNC110 - other processes decide it
            await asyncio.sleep(0.5)


async def measure(kills: int, away: float, root: Path, report: Report, *, copies: bool) -> None:
    """One swarm. Raises what the launcher raises."""
    swarm, rng = LocalSwarm(root), random.Random(7)
    try:
        await begin(swarm, root, copies=copies)
        monitor = SwarmMonitor(swarm, list(SPANS))
        watching = asyncio.create_task(monitor.run())
        try:
            for number in range(kills):
                await one(monitor, number, rng, away, report, copies=copies)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        events = await swarm.ctl("events")
    finally:
        await swarm.close()
    chains = [demo.chain_of(root / name / "runs" / RUN / "manifests") for name in SPANS]
    twice = counted_twice({number: head for chain in chains for number, head in chain.items()})
    print(
        f"{twice} samples stand in sums beyond those that were consumed; {monitor.repeated} were read again", flush=True
    )
    twice = max(0, twice - monitor.repeated)
    recovered = events.count("run.recovered")
    name = "with copies" if copies else "without"
    report.accept(f"rounds that were gone back behind, {name}", target="0", value=recovered, holds=recovered == 0)
    report.accept(
        f"histories that differ, {name}",
        target="0",
        value=int(not demo.chains_agree(chains)),
        holds=demo.chains_agree(chains),
    )
    report.accept(f"micro-batches counted twice, {name}", target="0", value=twice, holds=twice == 0)


async def one(
    monitor: SwarmMonitor, number: int, rng: random.Random, away: float, report: Report, *, copies: bool
) -> None:
    """A stage (one that has a copy) dies, and comes back later. They take turns."""
    swarm = monitor.swarm
    await settle(monitor, copies=copies)
    await asyncio.sleep(rng.uniform(0, 8 * PACE_SECONDS))  # somewhere between two rounds
    able = await copied(swarm) if copies else sorted(SPANS)
    victim = able[number % len(able)]
    others = [name for name in SPANS if name != victim]
    version = monitor.now[others[0]]["plan_version"]
    began = time.monotonic()
    await kill(swarm, victim)
    returning = asyncio.create_task(_return(swarm, victim, away))
    planned = 0.0
    while time.monotonic() < began + WATCHED_SECONDS:
        if not planned and any(monitor.now[name]["plan_version"] > version for name in others):
            planned = time.monotonic()
        await asyncio.sleep(0.05)
    await returning
    report.cell(
        copies=copies,
        away_s=away,
        victim=victim,
        pause_s=monitor.pause(others, began, time.monotonic()),
        plan_s=planned - began if planned else None,
        took=_keeper(monitor, victim),
    )
    print(json.dumps(report.cells[-1]), flush=True)


async def _return(swarm: LocalSwarm, name: str, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await swarm.restart_member(name)


def _keeper(monitor: SwarmMonitor, victim: str) -> str:
    """Who has the most layers now."""
    there = {name: status["layers"] for name, status in monitor.now.items() if name != victim and status["layers"]}
    return max(there, key=lambda name: there[name][1] - there[name][0], default="")


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--away", type=float, default=20.0, help="seconds until who was killed is started again")
    parser.add_argument("--without", action="store_true", help="only the run that wants no second copies")
    parser.add_argument("--name", default="second_copies", help="of the result's file")
    chosen = parser.parse_args()
    report = Report(chosen.name)
    with report_on_exit(report, _NOTES):
        for copies in (False,) if chosen.without else (True, False):
            kills = chosen.kills if copies else -(-chosen.kills // _FEWER)
            with tempfile.TemporaryDirectory(prefix="atoll-") as scratch:
                asyncio.run(measure(kills, chosen.away, Path(scratch), report, copies=copies))
        pauses = [cell["pause_s"] for cell in report.cells if cell["copies"]]
        for name, value in (("median", statistics.median(pauses)), ("worst", max(pauses))) if pauses else ():
            report.accept(
                f"longest pause of a route whose stage a neighbour had a copy of, {name}",
                target=f"≤ {_TARGET_SECONDS:g}",
                value=value,
                holds=value <= _TARGET_SECONDS,
            )


if __name__ == "__main__":
    main()
