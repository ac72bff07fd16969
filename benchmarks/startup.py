"""Start-up and idle cost: how soon commands answer, and what a seed, a node and a coordinator hold in memory."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil

from atoll.lab.corpus import write_python_corpus
from atoll.lab.demo import INNER_STEPS, spec_toml
from atoll.lab.launcher import LocalSwarm
from benchmarks.common import Report

REPETITIONS = 7
ANSWER_SECONDS = 0.5
READY = timedelta(seconds=120)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        asyncio.run(_measure(Path(folder)))


async def _measure(root: Path) -> None:
    report = Report("startup")
    swarm = LocalSwarm(root)
    try:
        started = time.monotonic()
        await swarm.start_coordinator()
        coordinator_seconds = time.monotonic() - started
        corpus = root / "corpus.txt"
        write_python_corpus(corpus)
        await swarm.create_run(
            spec_toml(
                seed=0, nodes=2, tokens=10**9, corpus=corpus, codec="int4", slowdowns=(1, 1), inner_steps=INNER_STEPS
            )
        )
        seed_seconds = await _until(swarm, "seed", "seed", "ready")
        node_seconds = await _until(swarm, "node", "node", "ready")  # waits for a second node: idle
        _commands(report, swarm)
        report.cell(
            what="atoll-coordinator serve: listening", seconds=coordinator_seconds, rss_mib=_rss(swarm, "coordinator")
        )
        report.cell(what="atoll join as a seed: ready", seconds=seed_seconds, rss_mib=_rss(swarm, "seed"))
        report.cell(what="atoll join as a node: ready, idle", seconds=node_seconds, rss_mib=_rss(swarm, "node"))
    finally:
        await swarm.close()
    report.finish(
        "medians of seven for commands; RSS sums a daemon, its p2pd and its trainer (shared pages counted in each)"
    )


async def _until(swarm: LocalSwarm, name: str, role: str, state: str) -> float:
    started = time.monotonic()
    await swarm.start_member(name, role)
    await swarm.until(lambda: swarm.in_state(name, state), f"{name} did not become {state}", READY)
    return time.monotonic() - started


def _commands(report: Report, swarm: LocalSwarm) -> None:
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "ATOLL_CREDENTIALS": str(swarm.root / "coordinator" / "admin")}
    commands = {
        "atoll status": [scripts / "atoll", "status", "--data-dir", swarm.root / "seed"],
        "atoll --help": [scripts / "atoll", "--help"],
        "atollctl node list": [scripts / "atollctl", "node", "list"],
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    for name, command in commands.items():
        samples = []
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
            samples.append(time.perf_counter() - started)
        seconds = statistics.median(samples)
        report.cell(what=name, seconds=seconds, rss_mib=0.0)
        if name in ("atoll status", "atollctl node list"):
            report.accept(f"{name} answers", target="< 0.5 s", value=seconds, holds=seconds < ANSWER_SECONDS)


def _rss(swarm: LocalSwarm, name: str) -> float:
    daemon = psutil.Process(swarm.programs[name].pid)
    return sum(process.memory_info().rss for process in [daemon, *daemon.children(recursive=True)]) / 2**20


if __name__ == "__main__":
    main()
