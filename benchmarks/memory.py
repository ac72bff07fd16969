"""What a trainer process with a span takes of its machine's memory, beside what the planner gives it room for.

    python -m benchmarks.memory

Twelve pairs: four models, each trained by a route of three stages, which are the trainer processes that nodes run.
Between them stand the shipped bridges, over streams within this process. Some flushes are stepped, a snapshot of the
whole span is taken, and flushes go on. `measured` is the peak of a process's resident memory without what it shares
with its daemon, less the same of a route of a model of next to nothing (interpreter, torch, threads, corpus). The
estimate is the planner's for this span (`Room.device_bytes`), less its estimate for that small model; `trainer_mb` is
the figure by which the trainer itself refuses a span (`stage_trainer_memory_bytes`), which may not be above the
planner's.

No machine here has a GPU: there the allocator's figure would be asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from support.memory_network import MemoryHub

from atoll.coordinator.planner.span_memory import span_memory
from atoll.core.run_spec import parse_run_spec
from atoll.lab.corpus import write_python_corpus
from atoll.node.model.run_model import RunModel, run_model
from atoll.node.model.span import Span
from atoll.node.pipeline.dispatcher import RouteDispatcher
from atoll.node.pipeline.route import RoutePlace
from atoll.node.trainer.device_room import stage_bytes
from atoll.node.trainer.trainer import TrainerConfig
from benchmarks.common import Report
from benchmarks.stage_process import StageProcess

WITHIN = 0.10
FLUSHES = 3  # before the snapshot, and after it
_PATIENCE_SECONDS = 240.0
_LOOK_SECONDS = 0.002
_MB = 1e6


@dataclass(frozen=True)
class Model:
    """A model, how it is trained, and where it is cut."""

    name: str
    model: str  # of the run spec
    sequence_length: int
    samples: int  # of a micro-batch
    micro_batches: int
    spans: tuple[Span, ...]
    accumulate: int = 1  # micro-batches of a step of the whole model

    @property
    def toml(self) -> str:
        """The run."""
        return (
            f'version = 1\n[run]\nname = "memory"\nstop_tokens = 1000000000\n[model]\n{self.model}\n'
            f'[data]\npath = "nowhere.txt"\nsequence_length = {self.sequence_length}\nvalidation_samples = 4\n'
            f"[optimizer]\nmicro_batch_samples = {self.samples}\naccumulate = {self.accumulate}\n"
            f"[pipeline]\nmicro_batches = {self.micro_batches}\n[sync]\nround_tokens = 1000000\n"
        )

    def planned_bytes(self, span: Span) -> float:
        """What the planner counts for a span."""
        spec = parse_run_spec(self.toml)
        found = span_memory(self._run().table.SerializeToString(), spec)
        assert found is not None
        return found.device_bytes(span.first, span.last)

    def refused_bytes(self, span: Span) -> int:
        """Above which its trainer refuses it."""
        return stage_bytes(parse_run_spec(self.toml), self._run(), span)

    def _run(self) -> RunModel:
        return run_model(parse_run_spec(self.toml), 256)


def decoder(dimension: int, layers: int, heads: int, hidden: int, vocabulary: int, tied: bool = False) -> str:
    return (
        f'preset = "nano"\nvocabulary = {vocabulary}\ndimension = {dimension}\nlayers = {layers}\nheads = {heads}\n'
        f"kv_heads = {heads}\nhidden_dimension = {hidden}\ntie_embeddings = {'true' if tied else 'false'}"
    )


MODELS = (
    Model("wide", decoder(768, 7, 12, 2048, 256), 256, 2, 6, (Span(0, 2), Span(3, 5), Span(6, 8))),
    Model("long samples", decoder(512, 10, 8, 1536, 256), 1024, 2, 4, (Span(0, 3), Span(4, 7), Span(8, 11))),
    Model("large vocabulary", decoder(384, 6, 6, 1024, 32000), 256, 4, 6, (Span(0, 2), Span(3, 5), Span(6, 7))),
    Model("tied", decoder(512, 6, 8, 1376, 16384, tied=True), 256, 2, 6, (Span(0, 2), Span(3, 5), Span(6, 7))),
)
KNOWN = (("embedding", 1e-6, 1e-6), ("block", 1e-6, 1e-6), ("head", 1e-6, 1e-6))  # as after a node's first trainer
LIMIT = 16 * 10**9  # far above, but set: then large tensors go back to the system, as where an owner limits memory
NOTHING = Model("nothing", decoder(16, 4, 2, 32, 256), 64, 1, 2, (Span(0, 1), Span(2, 3), Span(4, 5)))


class PeakMemory:
    """The peak of a process's memory that it shares with nobody, looked at all the time."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """Bytes; the kernel's own high-water mark counts too, with what was shared then at most."""
        self._over.set()
        self._thread.join()
        lines = self._lines()
        return max(self._peak, lines["VmHWM"] - lines["RssShmem"] - lines["RssFile"])

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._peak = max(self._peak, self._lines()["RssAnon"])

    def _lines(self) -> dict[str, int]:
        pairs = (line.split(":", 1) for line in self._status.read_text().splitlines())
        return {name: 1024 * int(value.split()[0]) for name, value in pairs if name.startswith(("Rss", "VmHWM"))}


async def peaks(model: Model, corpus: Path, directory: Path) -> list[int]:
    """Bytes of each stage's process at worst. Raises `TimeoutError`, and what trainers raise."""
    hub = MemoryHub()
    peers = tuple(f"stage-{stage}" for stage in range(len(model.spans)))
    stages: list[StageProcess] = []
    async with AsyncExitStack() as undo:
        for stage, span in enumerate(model.spans):
            held = span.first, span.last
            config = TrainerConfig(
                model.toml, str(corpus), device="cpu", memory_bytes=LIMIT, span=held, layer_times=KNOWN
            )
            dispatcher = RouteDispatcher(hub.join(peers[stage]))
            place = RoutePlace(1, 0, peers, stage)
            stages.append(await StageProcess.start(dispatcher, place, config, directory / f"{model.name}-{stage}.log"))
            undo.push_async_callback(stages[-1].stop)
        watches = [PeakMemory(stage.trainer.pid) for stage in stages]
        await _stepped(stages, FLUSHES)
        await asyncio.gather(*(stage.trainer.snapshot() for stage in stages))
        await _stepped(stages, FLUSHES)
        return [watch.end() for watch in watches]


async def _stepped(stages: Sequence[StageProcess], flushes: int) -> None:
    """Until every stage stepped so many more."""
    enough = [stage.trainer.status.steps + flushes for stage in stages]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(stage.trainer.status.steps < least for stage, least in zip(stages, enough, strict=True)):
        if time.monotonic() > deadline:
            raise TimeoutError("; ".join(stage.trainer.status.route_trouble for stage in stages))
        await asyncio.sleep(0.1)


async def run(report: Report, names: Sequence[str]) -> None:
    """All models that were asked for."""
    with tempfile.TemporaryDirectory(prefix="atoll-") as place:
        directory = Path(place)
        corpus = directory / "corpus.txt"
        write_python_corpus(corpus, 1 << 20)
        floor = await peaks(NOTHING, corpus, directory)
        for model in (model for model in MODELS if model.name in names):
            measured = await peaks(model, corpus, directory)
            for stage, span in enumerate(model.spans):
                nothing = NOTHING.planned_bytes(NOTHING.spans[stage])
                took = measured[stage] - floor[stage]
                planned = model.planned_bytes(span) - nothing
                report.cell(
                    model=model.name,
                    layers=f"{span.first}-{span.last}",
                    process_mb=measured[stage] / _MB,
                    measured_mb=took / _MB,
                    planned_mb=planned / _MB,
                    trainer_mb=(model.refused_bytes(span) - nothing) / _MB,
                    planned_over_measured=planned / took,
                )
                print(report.cells[-1], flush=True)


def judge(report: Report) -> None:
    """The acceptance row."""
    ratios = [cell["planned_over_measured"] for cell in report.cells]
    good = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    report.accept(
        f"the planner's estimate is within {WITHIN:.0%} of the peak",
        target=f"{len(MODELS) * 3} of {len(MODELS) * 3} pairs",
        value=f"{good} of {len(ratios)}, from {min(ratios):.3f} to {max(ratios):.3f}",
        holds=good == len(ratios) == 3 * len(MODELS),
    )
    most = max(cell["trainer_mb"] / cell["planned_mb"] for cell in report.cells)
    report.accept("no trainer refuses what the planner gives it", target="≤ 1", value=most, holds=most <= 1)


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--name", default="memory", help="of the result's file")
    chosen = parser.parse_args()
    report = Report(chosen.name)
    asyncio.run(run(report, chosen.models))
    judge(report)
    report.finish(
        f"fp32 on a CPU, routes of three stages, AdamW; {2 * FLUSHES} flushes and a snapshot of the whole span"
    )


if __name__ == "__main__":
    main()
