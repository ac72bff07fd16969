"""A node whose trainer spreads the model over several devices: what each takes of memory, and how fast they are.

    python -m benchmarks.devices

No machine here has GPUs, so devices are processes with one core each, over gloo. Each case trains the whole model for
some steps, evaluates the anchor, takes a snapshot and goes on. `largest_mb` is the peak of the largest process's own
resident memory, less the same of a model of next to nothing; `planned_mb` a device's part of what the trainer counts
before it takes the model (`loading.whole_model_bytes` and `usable_facts`). `speed_up` is against one process with one
core.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.lab.corpus import write_python_corpus
from atoll.node.model.run_model import RunModel, run_model
from atoll.node.trainer.device_room import usable_facts, whole_model_bytes
from atoll.node.trainer.trainer import Trainer, TrainerConfig
from atoll.node.training.device import DeviceFacts
from benchmarks.common import Report
from benchmarks.memory import KNOWN, LIMIT, MODELS, NOTHING, Model, PeakMemory, decoder

DEVICES = (1, 2)
STEPS = 6
UNEVEN = tuple(
    Model(f"{samples} samples, {times} times", decoder(256, 6, 8, 704, 256), 512, samples, 6, (), times)
    for samples, times in ((2, 4), (1, 1), (3, 2))
)
_PATIENCE = timedelta(minutes=5)
_MB = 1e6


@dataclass(frozen=True)
class CaseResult:
    """Of one case."""

    largest_bytes: int
    tokens_per_second: float


async def train(model: Model, devices: int, corpus: Path) -> CaseResult:
    """Some steps with everything that takes memory between them. Raises what trainers raise."""
    config = TrainerConfig(
        model.toml,
        str(corpus),
        device=",".join(["cpu"] * devices),
        cpu_threads=devices,
        memory_bytes=LIMIT,
        layer_times=KNOWN,
    )
    trainer = await Trainer.spawn(config, log_path=corpus.parent / "trainer.log", timeout=_PATIENCE)
    try:
        await trainer.initialise()
        await trainer.load(ranges=((0, 10_000),), committed_tokens=0)
        processes = [trainer.pid, *(child.pid for child in psutil.Process(trainer.pid).children())]
        watches = [PeakMemory(pid) for pid in processes]
        await trainer.train()
        began = await _stepped(trainer, 1)
        ended = await _stepped(trainer, STEPS)
        await trainer.evaluate()
        await trainer.snapshot()
        await _stepped(trainer, 2)
        tokens = STEPS * trainer.facts.tokens_per_step
        return CaseResult(max(watch.end() for watch in watches), tokens / (ended - began))
    finally:
        await trainer.stop(_PATIENCE)


async def _stepped(trainer: Trainer, more: int) -> float:
    """When so many more steps were taken."""
    enough = trainer.status.steps + more
    deadline = time.monotonic() + _PATIENCE.total_seconds()
    while trainer.status.steps < enough:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{trainer.status.steps} steps of {enough}")
        await asyncio.sleep(0.005)
    return time.monotonic()


def planned(model: Model, devices: int) -> float:
    """Bytes of each, with which the trainer would take the model."""
    spec = parse_run_spec(model.toml)
    run = run_model(spec, 256)
    return (
        _least(
            lambda memory: (
                whole_model_bytes(spec, run, [torch.device("cpu")] * devices) <= _usable(spec, run, devices, memory)
            )
        )
        / devices
    )


def _usable(spec: RunSpec, run: RunModel, devices: int, memory: int) -> int:
    return usable_facts(DeviceFacts("cpu", "", memory), spec, run, devices).memory_bytes


def _least(enough: Callable[[int], bool]) -> int:
    """Bytes, by halving."""
    low, high = 0, LIMIT
    while high - low > _MB:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


async def measure(report: Report) -> None:
    """All cases."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        corpus = Path(folder) / "corpus.txt"
        write_python_corpus(corpus, 1 << 20)
        small = replace(NOTHING, samples=2)
        floors = {devices: (await train(small, devices, corpus)).largest_bytes for devices in DEVICES}
        for model in (*(it for it in MODELS if it.name != "long samples"), *UNEVEN):  # which takes half an hour
            alone = 0.0
            for devices in DEVICES:
                took = await train(model, devices, corpus)
                alone = alone or took.tokens_per_second
                counted = planned(model, devices) - planned(small, devices)
                measured = took.largest_bytes - floors[devices]
                report.cell(
                    model=model.name,
                    devices=devices,
                    largest_mb=measured / _MB,
                    planned_mb=counted / _MB,
                    planned_over_measured=counted / measured,
                    tokens_per_second=took.tokens_per_second,
                    speed_up=took.tokens_per_second / alone,
                )
                print(report.cells[-1], flush=True)


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    report = Report("devices")
    asyncio.run(measure(report))
    one, two = ([cell for cell in report.cells if cell["devices"] == count] for count in DEVICES)
    share = max(its["largest_mb"] / alone["largest_mb"] for alone, its in zip(one, two, strict=True))
    report.accept("what each of two takes of what one takes alone", target="≤ 0.65", value=share, holds=share <= 0.65)
    least, alone = (min(cell["planned_over_measured"] for cell in cells) for cells in (two, one))
    report.accept("counted over measured, at worst", target=f"≥ {alone:.2f}, of one", value=least, holds=least >= alone)
    report.finish("fp32 on a CPU, AdamW, the whole model; a core for each device")


if __name__ == "__main__":
    main()
