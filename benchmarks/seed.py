"""What a seed takes: the memory of its processes, and the disk of its packages.

    python -m benchmarks.seed [--beside NAME=ENVIRONMENT …]

Builds the wheel, installs it as docs/guide/operator.md says into an environment of its own, and starts a seed from
there. This seed mirrors a corpus; a coordinator and a node from this checkout's environment use it. Memory is measured
when the seed is ready, and again when the node has fetched blocks and trained a round. RSS and PSS sum the seed's
process and its p2pd. `--beside` measures the seed of another environment too, such as one with an earlier release.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
from support.installed_programs import InstalledPrograms, build_wheel, install_seed

from atoll.lab.launcher import LocalSwarm
from benchmarks.common import Report
from benchmarks.corpus_server import write_corpus

READY = timedelta(seconds=600)  # a busy machine is slow
RSS_MB, INSTALLED_MB = 150, 250
NOTES = (
    "MB are 10^6 bytes. installed_mb: all files of site-packages without pip and setuptools, compiled ones included. "
    "ready: the seed says so; mirrored: after a node fetched blocks from it and trained a round."
)
_RUN = """
version = 1
[run]
name = "reef"
min_nodes = 1
stop_tokens = 1000000000
[model]
preset = "nano"
[data]
source = "corpus"
corpus = "{corpus}"
tokenizer = "corpus"
sequence_length = 64
validation_samples = 8
[sync]
round_tokens = 6000
round_max_seconds = 20
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", metavar="NAME=ENVIRONMENT", action="append", default=[])
    options = parser.parse_args()
    report = Report("seed")
    with tempfile.TemporaryDirectory(prefix="atoll-") as scratch:
        root = Path(scratch)
        environments = {name: Path(path).resolve() for name, _, path in (it.partition("=") for it in options.beside)}
        for name, environment in {**environments, "atoll[seed]": install_wheel(root)}.items():
            asyncio.run(measure(report, name, environment, root / name))
    _accept(report)
    report.finish(NOTES)


def install_wheel(root: Path) -> Path:
    """Install this checkout's wheel as a seed, into a new environment."""
    environment = root / "environment"
    install_seed(build_wheel(root), environment)
    return environment


async def measure(report: Report, name: str, environment: Path, root: Path) -> None:
    """Measure the seed of one environment."""
    digest = _write_text(root)
    swarm = LocalSwarm(root, InstalledPrograms({"seed": environment}))
    try:
        await swarm.start_coordinator()
        await swarm.create_run(_RUN.format(corpus=digest))
        await swarm.start_member("seed", "seed", "--data", str(root / "corpus"))
        await swarm.until(lambda: swarm.in_state("seed", "ready"), "the seed did not become ready", READY)
        _cell(report, name, "ready", environment, swarm)
        await swarm.start_member("node")
        await swarm.until(lambda: _rounds(swarm) > 0, "the node trained no round", READY)
        served = (swarm.status("seed") or {})["corpus_bytes_to_members"]
        assert served > 0, "the node did not read from the seed"
        _cell(report, name, "mirrored", environment, swarm)
    finally:
        await swarm.close()


def _write_text(root: Path) -> str:
    """Write a corpus of 13 MB to `root` / corpus; return its digest."""
    root.mkdir()
    numbers = np.random.default_rng(0).integers(0, 10_000, 400_000)
    return write_corpus(
        root / "corpus", {"web": [b"".join(b"The %dth wave broke on the reef.\0" % it for it in numbers)]}
    )


def _rounds(swarm: LocalSwarm) -> int:
    return int((swarm.status("node") or {}).get("rounds_committed", 0))


def _cell(report: Report, name: str, when: str, environment: Path, swarm: LocalSwarm) -> None:
    daemon = psutil.Process(swarm.programs["seed"].pid)
    memory = [process.memory_full_info() for process in (daemon, *daemon.children(recursive=True))]
    report.cell(
        environment=name,
        when=when,
        processes=len(memory),
        daemon_rss_mb=memory[0].rss / 1e6,
        p2pd_rss_mb=sum(each.rss for each in memory[1:]) / 1e6,
        rss_mb=sum(each.rss for each in memory) / 1e6,
        pss_mb=sum(each.pss for each in memory) / 1e6,
        installed_mb=installed_bytes(environment) / 1e6,
    )


def installed_bytes(environment: Path) -> int:
    """Bytes of the environment's packages."""
    (packages,) = environment.glob("lib/python*/site-packages")
    tools = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
    counted = [path for path in packages.iterdir() if path.name.partition("-")[0] not in tools]
    files = [file for path in counted for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _accept(report: Report) -> None:
    last = report.cells[-1]
    for name, target, value in (
        ("memory of a seed that mirrors a corpus (RSS)", RSS_MB, last["rss_mb"]),
        ("installed packages of a seed", INSTALLED_MB, last["installed_mb"]),
    ):
        report.accept(name, target=f"≤ {target} MB", value=round(value, 1), holds=value <= target)


if __name__ == "__main__":
    main()
