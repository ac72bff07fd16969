"""Swarms of real processes under fire: what killing and freezing members costs in rounds, seconds and loss.

    python -m benchmarks.faults [--minutes 10] [--nodes 8] [--strikes 8] [--only recovery]

Three parts. `recovery`: four nodes; one is struck by SIGKILL or SIGSTOP at a random moment, and the clock runs until
a round is committed without it, against the median time between commits of the same run before. `kill` and `stop`:
nodes train while three of them, drawn at random, are killed (and started again at once) or frozen for 5 to 60 s, every
30 s; the same swarm undisturbed says what loss it would have had at equal tokens. All chains of manifests are compared
round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from atoll.core.files import make_private_dir
from atoll.core.manifest import Head
from atoll.node.lab.corpus import write_python_corpus
from atoll.node.lab.demo import RUN, spec_toml
from atoll.node.lab.launcher import LocalSwarm
from atoll.node.lab.trouble import kill
from atoll.node.state.manifests import ManifestStore
from benchmarks.common import Report

PACE_SECONDS = 0.8  # of an inner step: two cores carry eight nodes and the start of three
INNER_STEPS = 5
STRIKE_EVERY = 30.0
FREEZE_SECONDS = (5.0, 60.0)
PATIENCE = timedelta(seconds=240)
WARM_ROUNDS = 6


@dataclass
class Swarm:
    """One running swarm and what it left on its disks."""

    local: LocalSwarm
    names: list[str]
    page: str

    def chain(self, name: str) -> dict[int, tuple[Head, float]]:
        """A node's manifests by round, with the time at which each became durable there."""
        directory = self.local.root / name / "runs" / RUN / "manifests"
        if not directory.exists():
            return {}
        store = ManifestStore(directory, RUN)
        found = {}
        for path in directory.glob("*.manifest"):
            committed = store.get(int(path.stem)) if path.stem.isdigit() else None
            if committed is not None and int(path.stem) > 0:
                found[int(path.stem)] = (Head(committed), path.stat().st_mtime)
        return found

    def known(self) -> dict[int, tuple[Head, float]]:
        """Every committed round, when the first node had it. Raises AssertionError when two nodes differ."""
        merged: dict[int, tuple[Head, float]] = {}
        for name in self.names:
            for number, (head, when) in self.chain(name).items():
                before = merged.get(number)
                assert before is None or before[0].hash == head.hash, f"two results for round {number}"
                merged[number] = (head, min(when, before[1]) if before else when)
        return merged

    def newest(self) -> int:
        return max((number for name in self.names for number in self._rounds(name)), default=0)

    def _rounds(self, name: str) -> list[int]:
        directory = self.local.root / name / "runs" / RUN / "manifests"
        return [int(path.stem) for path in directory.glob("0*.manifest")]

    def peer(self, name: str) -> str:
        status = self.local.status(name)
        assert status is not None
        return str(status["peer_id"])

    async def until(self, condition: Callable[[], bool], problem: str) -> None:
        await self.local.until(condition, problem, PATIENCE)

    def run(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.page + "api/status", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)["runs"][0]
        return found


@dataclass
class Struck:
    """What was done."""

    kills: int = 0
    stops: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


async def start(root: Path, nodes: int, corpus: Path) -> Swarm:
    local = LocalSwarm(make_private_dir(root))
    spec = spec_toml(
        seed=0,
        nodes=nodes,
        tokens=10**9,
        corpus=corpus,
        codec="int4",
        slowdowns=[1.0] * nodes,
        inner_steps=INNER_STEPS,
    ).replace(f"outer_warmup_tokens = {10**9}", "outer_warmup_tokens = 200000")
    spec = spec.replace(f"warmup_tokens = {10**9 // 20}", "warmup_tokens = 20000")
    endpoints = await local.start_coordinator("--lost-after-seconds", "20")
    await local.create_run(spec)
    await local.start_member("seed", "seed")
    await local.until(lambda: local.in_state("seed", "ready"), "the seed did not become ready", PATIENCE)
    names = [f"node-{i + 1}" for i in range(nodes)]
    for name in names:
        await local.start_member(name, "node", "--cpu-threads", "1", "--minimum-step-seconds", str(PACE_SECONDS))
    swarm = Swarm(local, names, endpoints["http"])
    await swarm.until(lambda: swarm.newest() >= WARM_ROUNDS, "the swarm did not begin")
    return swarm


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


async def freeze(swarm: Swarm, name: str, seconds: float) -> None:
    processes = family(swarm.local.programs[name].pid)
    for process in processes:
        process.suspend()
    try:
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


# --- recovery ---------------------------------------------------------------------------------------------


async def recovery(root: Path, corpus: Path, strikes: int, report: Report) -> None:
    rng = random.Random(7)
    swarm = await start(root, 4, corpus)
    try:
        for kind in ("SIGKILL", "SIGSTOP"):
            ratios, seconds, rounds = [], [], []
            for _ in range(strikes):
                usual = await _usual_round(swarm)
                took = await _strike(swarm, rng, kind)
                rounds.append(usual)
                seconds.append(took)
                ratios.append(took / usual)
            report.cell(
                part="recovery",
                what=f"{kind} of 1 of 4 → a round without it",
                median_s=round(statistics.median(seconds), 2),
                worst_s=round(max(seconds), 2),
                usual_round_s=round(statistics.median(rounds), 2),
                ratio=round(statistics.median(ratios), 2),
                worst_ratio=round(max(ratios), 2),
            )
            worst = statistics.median(ratios)
            report.accept(f"{kind}: commit, in median rounds", target="≤ 3", value=round(worst, 2), holds=worst <= 3)
        swarm.known()
    finally:
        await swarm.local.close()


async def _usual_round(swarm: Swarm) -> float:
    """Median seconds between the commits of some rounds in which everyone is present."""
    began = swarm.newest()
    await swarm.until(lambda: swarm.newest() >= began + 5, "no rounds in peace")
    times = [when for number, (_, when) in sorted(swarm.known().items()) if number >= began]
    return statistics.median(after - before for before, after in pairwise(times))


async def _strike(swarm: Swarm, rng: random.Random, kind: str) -> float:
    """Seconds from the strike until the first commit after it; returns when the victim is part of rounds again."""
    victim = rng.choice(swarm.names)
    peer = swarm.peer(victim)
    others = [name for name in swarm.names if name != victim]
    await asyncio.sleep(rng.uniform(0, 3))  # any moment of a round
    struck = time.time()
    stopping: asyncio.Task[None] | None = None
    if kind == "SIGKILL":
        await kill(swarm.local, victim)
    else:
        stopping = asyncio.create_task(freeze(swarm, victim, 30.0))

    def without() -> list[float]:
        return [
            when
            for name in others
            for head, when in swarm.chain(name).values()
            if when > struck and peer not in head.electorate.members
        ]

    await swarm.until(lambda: bool(without()), f"no round without {victim}")
    took = min(without()) - struck
    if stopping is not None:
        await stopping
    else:
        await swarm.local.restart_member(victim)
    before = swarm.newest()
    await swarm.until(
        lambda: any(
            peer in head.electorate.members
            for name in others
            for number, (head, _) in swarm.chain(name).items()
            if number > before
        ),
        f"{victim} did not come back",
    )
    return took


# --- a long time under fire ---------------------------------------------------------------------------------


async def under_fire(
    root: Path, corpus: Path, nodes: int, minutes: float, kind: str, report: Report
) -> dict[int, float]:
    """Losses by committed tokens. Everything else goes into the report."""
    rng = random.Random(11)
    swarm = await start(root, nodes, corpus)
    struck = Struck()
    try:
        first, end = swarm.newest(), time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            if kind != "none":
                for victim in rng.sample(swarm.names, 3):
                    task = asyncio.create_task(_hit(swarm, victim, kind, rng, struck))
                    struck.tasks.add(task)
            await asyncio.sleep(min(STRIKE_EVERY, max(0.0, end - time.monotonic())))
        await asyncio.gather(*struck.tasks)
        await swarm.until(lambda: all(swarm.local.in_state(n, "training") for n in swarm.names), "not all came back")
        peers = {swarm.peer(name) for name in swarm.names}
        await swarm.until(
            lambda: swarm.known()[swarm.newest()][0].electorate.members == peers, "not all decide together again"
        )
        known = swarm.known()
        times = [when for number, (_, when) in sorted(known.items()) if number >= first]
        gaps = [after - before for before, after in pairwise(times)]
        run = swarm.run()
        events = json.loads(await swarm.local.ctl("run", "rounds", "--output", "json"))["rounds"]
        reasons = Counter(_short(item["reason"]) for item in events if not item["committed"])
        report.cell(
            part="fire",
            what=f"{nodes} nodes, {kind}, {minutes:g} min: {struck.kills} kills, {struck.stops} stops",
            median_s=round(statistics.median(gaps), 2),
            worst_s=round(max(gaps), 2),
            usual_round_s=len(known),
            ratio=float(run["rounds_opened"] - run["rounds_committed"]),
            worst_ratio=float(sum(head.manifest.parts_zeroed for head, _ in known.values())),
        )
        if kind != "none":
            report.accept(f"{kind}: chains equal, all back", target="yes", value=True, holds=True)
            told = ", ".join(f"{count}× {reason}" for reason, count in reasons.most_common(4)) or "none"
            report.accept(f"{kind}: abandoned attempts", target="explained", value=told, holds=True)
        return {item["committed_tokens"]: item["loss"] for item in run["losses"]}
    finally:
        for task in struck.tasks:
            task.cancel()
        await asyncio.gather(*struck.tasks, return_exceptions=True)
        await swarm.local.close()


async def _hit(swarm: Swarm, victim: str, kind: str, rng: random.Random, struck: Struck) -> None:
    await asyncio.sleep(rng.uniform(0, 5))
    if victim not in swarm.local.programs:
        return
    if kind == "SIGKILL":
        struck.kills += 1
        await kill(swarm.local, victim)
        await swarm.local.restart_member(victim)
    else:
        struck.stops += 1
        with suppress(psutil.NoSuchProcess):
            await freeze(swarm, victim, rng.uniform(*FREEZE_SECONDS))


def _short(reason: str) -> str:
    return reason.split("(")[0].split(":")[0].strip()[:60]


def at_tokens(losses: dict[int, float], tokens: int) -> float:
    """The loss at `tokens`, interpolated."""
    below = max((item for item in losses if item <= tokens), default=min(losses))
    above = min((item for item in losses if item >= tokens), default=max(losses))
    if above == below:
        return losses[below]
    share = (tokens - below) / (above - below)
    return losses[below] * (1 - share) + losses[above] * share


def compare(losses: dict[int, float], peace: dict[int, float]) -> tuple[int, float]:
    """Tokens, and by how much the mean loss of the last fifth of the common tokens is above that in peace."""
    last = min(max(losses), max(peace))
    points = [item for item in losses if 0.8 * last <= item <= last] or [last]
    ours = statistics.fmean(losses[item] if item in losses else at_tokens(losses, item) for item in points)
    theirs = statistics.fmean(at_tokens(peace, item) for item in points)
    return last, ours / theirs - 1


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--strikes", type=int, default=8)
    parser.add_argument("--only", choices=("recovery", "fire"))
    options = parser.parse_args()
    report = Report("faults")
    with tempfile.TemporaryDirectory(prefix="atoll-faults-") as scratch:
        root = Path(scratch)
        corpus = root / "corpus.txt"
        write_python_corpus(corpus)
        if options.only != "fire":
            await recovery(root / "recovery", corpus, options.strikes, report)
        if options.only != "recovery":
            losses = {
                kind: await under_fire(root / kind, corpus, options.nodes, options.minutes, kind, report)
                for kind in ("none", "SIGKILL", "SIGSTOP")
            }
            for kind in ("SIGKILL", "SIGSTOP"):
                tokens, worse = compare(losses[kind], losses["none"])
                report.accept(
                    f"{kind}: loss at {tokens} tokens, against peace",
                    target="≤ +1 %",
                    value=f"{worse:+.2%}",
                    holds=worse <= 0.01,
                )
    report.finish(
        "In part `fire` the columns usual_round_s, ratio and worst_ratio hold the number of committed rounds, of "
        "abandoned attempts and of zeroed parts; median_s and worst_s are seconds between commits."
    )


if __name__ == "__main__":
    asyncio.run(main())
