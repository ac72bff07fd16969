"""How soon a node that starts again trains its first step, with much text and with little.

The shipped programs: a coordinator, a seed, and a node that has trained on its text before. The node is stopped with
SIGTERM and started again. The measure is the time from its start to its first inner step. `text` is plain text in one
file, `npy` a file of tokens, `corpus` a directory of shards. The page cache is as earlier starts leave it. The first
start comes when nobody has written to the file for a minute: before, a node reads a file of tokens at every start.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

from atoll.lab.launcher import LocalSwarm
from atoll.node.data.build import build_corpus
from atoll.node.data.build_spec import BuildSource, BuildSpec
from atoll.node.data.digest_records import QUIET_SECONDS
from benchmarks.common import Report

LARGE_BYTES, SMALL_BYTES, BLOCK_BYTES = 4_000_000_000, 4_000_000, 1 << 24
MOST = 1.3
_FIRST_START, _RESTART = timedelta(minutes=15), timedelta(minutes=5)
SPEC = """
version = 1
[run]
name = "restart"
min_nodes = 1
stop_tokens = 1_000_000_000_000
[model]
dimension = 64
layers = 2
heads = 4
hidden_dimension = 128
[data]
{data}
sequence_length = 128
validation_samples = 16
[sync]
round_tokens = 100_000
"""


def main() -> None:
    arguments = _arguments()
    report = Report("data_restart")
    for kind in arguments.kind:
        medians = {}
        for size in (SMALL_BYTES, arguments.bytes):
            with tempfile.TemporaryDirectory(prefix="atoll-restart-", dir=arguments.directory) as folder:
                seconds = asyncio.run(_restarts(Path(folder), kind, size, arguments.rounds))
            medians[size] = statistics.median(seconds)
            report.cell(kind=kind, megabytes=size / 1e6, median_seconds=medians[size], longest_seconds=max(seconds))
        ratio = medians[arguments.bytes] / medians[SMALL_BYTES]
        name = f"first step after a restart, {kind}, {arguments.bytes / 1e9:g} GB beside {SMALL_BYTES / 1e6:g} MB"
        report.accept(name, target=f"≤ {MOST}", value=ratio, holds=ratio <= MOST)
    report.finish(f"medians of {arguments.rounds} restarts of one node; the byte tokenizer, so a byte is a token")


def write_data(folder: Path, kind: str, size: int) -> str:
    """Write so many bytes of text, or tokens, and return the lines of `[data]` that name them."""
    generator = np.random.Generator(np.random.PCG64(1))
    text = folder / "text.txt"
    with text.open("wb") as file:
        while file.tell() < size:
            block = generator.integers(97, 123, min(BLOCK_BYTES, size), dtype=np.uint8)
            block[generator.integers(0, len(block), len(block) // 6)] = ord(" ")
            file.write(block.tobytes() + b"\n")
    if kind == "npy":
        np.save(folder / "tokens.npy", np.memmap(text, dtype=np.uint8, mode="r"))
        text.unlink()
        return f'source = "npy"\npath = "{folder / "tokens.npy"}"'
    if kind == "corpus":
        source = BuildSource(name="text", source="text", path=str(text))
        built = build_corpus(BuildSpec(tokenizer="bytes", sources=(source,)), folder / "corpus")
        text.unlink()
        return f'source = "corpus"\ntokenizer = "corpus"\ncorpus = "{built.digest}"\nmirrors = ["{folder / "corpus"}"]'
    return f'source = "text"\npath = "{text}"'


async def _restarts(folder: Path, kind: str, size: int, rounds: int) -> list[float]:
    data = write_data(folder, kind, size)
    if kind == "npy":
        await asyncio.sleep(QUIET_SECONDS + 1)
    (folder / "swarm").mkdir()
    swarm = LocalSwarm(folder / "swarm")
    try:
        await swarm.start_coordinator()
        await swarm.create_run(SPEC.format(data=data))
        await swarm.start_member("seed", "seed")
        await swarm.start_member("node", "node", "--cpu-threads", "1", "--minimum-step-seconds", "0.5")
        await _until_it_trains(swarm, _FIRST_START)
        found = []
        for _ in range(rounds):
            await swarm.stop("node")
            began = time.monotonic()
            await swarm.restart_member("node")
            await _until_it_trains(swarm, _RESTART)
            found.append(time.monotonic() - began)
        return found
    finally:
        await swarm.close()


async def _until_it_trains(swarm: LocalSwarm, timeout: timedelta) -> None:
    await swarm.until(
        lambda: (status := swarm.status("node")) is not None and status["steps"] >= 1, "the node is late", timeout
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=("text", "npy", "corpus"), default=["text", "npy", "corpus"])
    parser.add_argument("--bytes", type=int, default=LARGE_BYTES, help="of the larger text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where text and nodes are; default: the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
