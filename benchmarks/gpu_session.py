"""What the parts of `gpu_hour` share: the device, the text, models with data, and where figures go."""

from __future__ import annotations

import gc
import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.lab.corpus import write_python_corpus
from atoll.node.data.corpus import load_corpus
from atoll.node.training.device import synchronize
from atoll.node.training.loop import InnerLoop

VOCABULARY = 32_000
GIB = 2**30


@dataclass(frozen=True)
class Size:
    """A model and its micro-batch."""

    preset: str
    sequence_length: int
    samples: int

    def __str__(self) -> str:
        return f"{self.preset} {self.samples}×{self.sequence_length}"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.sequence_length * self.samples


@dataclass(frozen=True)
class Hour:
    """What all parts share: where figures go, the text, and the device."""

    part: str
    lines: Path
    corpus: Path
    cpu: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.cpu else torch.device("cuda", 0)

    def sizes(self, *sizes: Size) -> tuple[Size, ...]:
        """These, or one that a CPU steps at once."""
        return (Size("nano", 64, 2),) if self.cpu else sizes

    def say(self, case: str, **figures: Any) -> None:
        """Write what was measured."""
        rounded = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()
        }
        line = json.dumps({"part": self.part, "case": case, **rounded}, ensure_ascii=False)
        with self.lines.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def spec(self, size: Size, **optimizer: Any) -> RunSpec:
        """A run of this size; without `optimizer` values: bf16, and the defaults."""
        values = {"precision": "bf16", "micro_batch_samples": size.samples, **optimizer}
        lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
        vocabulary = "" if self.cpu else f"vocabulary = {VOCABULARY}\n"
        return parse_run_spec(
            f'version = 1\n[run]\nname = "gpu"\nstop_tokens = 1000000000000\n[model]\npreset = "{size.preset}"\n'
            f'{vocabulary}[data]\npath = "{self.corpus}"\nsequence_length = {size.sequence_length}\n'
            f"validation_samples = 32\n[optimizer]\n{lines}\n[sync]\nround_tokens = 1000\n"
        )

    @contextmanager
    def loop(self, spec: RunSpec) -> Iterator[tuple[InnerLoop, Tensor]]:
        """An inner loop with data and random weights, and the anchor on the host."""
        loop = InnerLoop(spec, load_corpus(spec), str(self.device))
        try:
            anchor_E = torch.randn(loop.layout.elements, device=self.device).mul_(0.02).cpu()
            loop.load(anchor_E, ranges=((0, 10**9),))
            yield loop, anchor_E
        finally:
            loop.close()
            loop.stepper = None
            self.forget()

    def forget(self) -> None:
        """Return unused memory to the device."""
        gc.collect()
        if not self.cpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """GiB of tensors since the last `forget`, at most."""
        return 0.0 if self.cpu else torch.cuda.max_memory_allocated() / GIB

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one call, with the device's work."""
        synchronize(self.device)
        began = time.perf_counter()
        work()
        synchronize(self.device)
        return time.perf_counter() - began

    def seconds_of(self, work: Callable[[], object], repetitions: int = 4, warm: int = 3) -> float:
        """Median seconds of one of five calls in a row, between two waits for the device."""
        for _ in range(warm):
            work()
        synchronize(self.device)
        samples = []
        for _ in range(1 if self.cpu else repetitions):
            began = time.perf_counter()
            for _ in range(5):
                work()
            synchronize(self.device)
            samples.append((time.perf_counter() - began) / 5)
        return statistics.median(samples)


def write_corpus(path: Path, small: bool) -> None:
    """Write Python sources: of the library, and of what is installed beside it until there are 48 MB."""
    written = write_python_corpus(path, 1 << 20 if small else 48 << 20)
    if small:
        return
    with path.open("a", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            if written > 48 << 20:
                return
            written += file.write(source.read_text(encoding="utf-8", errors="ignore").replace("\0", ""))
