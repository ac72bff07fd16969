"""The parts of `gpu_hour`, each run in a process of its own: `python -m benchmarks.gpu_parts PART LINES CORPUS`.

`speed`: steps of the inner loop beside a plain loop that trains the same model, compiled and not. `hot_loop`: how often
a step waits for the device, and how much of the time it computes. `rounds`: how long what a round asks of the
trainer stops it, beside raw copies. `memory`: the peak through steps, snapshot, apply and evaluation, beside the
estimate by which a node refuses a model. `swarm`: four daemons on the one device. `mixed_swarm`: daemons with and
without it in one run, whose anchors must be equal bit for bit. `route`: two stages on it beside the whole model.
`recipe`: what run specs mean by default, beside synchronous training (`recipe.py` says how), with 30 M parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import gc
import itertools
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from support.memory_network import MemoryHub
from torch import Tensor, nn

from atoll.core.files import open_anonymous_file
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.lab.corpus import write_python_corpus
from atoll.lab.demo import RUN
from atoll.lab.launcher import LocalSwarm
from atoll.node.data.corpus import load_corpus
from atoll.node.model.built_in_shape import ModelShape, resolve_shape
from atoll.node.model.llama import Decoder
from atoll.node.model.span import Span
from atoll.node.pipeline.dispatcher import RouteDispatcher
from atoll.node.pipeline.route import RoutePlace
from atoll.node.system.shared_vectors import allocate_vector, map_vector
from atoll.node.trainer.trainer import TrainerConfig
from atoll.node.training.device import autocast, lock_host_pages, synchronize
from atoll.node.training.loop import InnerLoop
from benchmarks.process_swarm import LabSwarm
from benchmarks.stage_process import StageProcess

VOCABULARY = 32_000
ROUNDS_WATCHED_SECONDS = 45
MIXED_ROUNDS = 6
_GIB = 2**30
_READY = timedelta(seconds=180)


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
        return 0.0 if self.cpu else torch.cuda.max_memory_allocated() / _GIB

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


# --- the device alone -----------------------------------------------------------------------------


def tests(hour: Hour) -> None:
    """Run `tests/gpu`."""
    plugins = ("pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin")  # others that are installed are not ours
    named = [word for plugin in plugins for word in ("-p", plugin)]
    workers = str(min(6, os.cpu_count() or 1))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *named, "-q", "-n", workers, "-m", "gpu", "tests/gpu"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    print(done.stdout, done.stderr)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+.*)$", done.stdout, re.MULTILINE)
    hour.say("tests/gpu", passed=counts.get("passed", 0), skipped=counts.get("skipped", 0), failed=failed)


def speed(hour: Hour) -> None:
    """Inner steps beside plain ones."""
    peak = _matrix_flops(hour)
    hour.say("matrix product", tflops=peak / 1e12)
    sizes = hour.sizes(Size("125m", 1024, 16), Size("1b", 2048, 8))
    for compiled, size in itertools.product((False, True), sizes):
        shape = resolve_shape(hour.spec(size).model, 256)
        flops = size.tokens * (6 * shape.parameters + 6 * shape.layers * shape.dimension * size.sequence_length)

        def told(case: str, first_seconds: float, seconds: float, size: Size = size, flops: int = flops) -> None:
            hour.say(
                f"{size} {case}",
                first_step_s=first_seconds,
                step_ms=1000 * seconds,
                tokens_per_s=size.tokens / seconds,
                mfu=flops / seconds / peak,
                peak_gib=hour.peak(),
            )

        words = "compiled" if compiled else "eager"
        hour.forget()
        step = _plain_step(hour, shape, size, compiled)
        told(f"plain adamw {words}", _seconds(hour, step), hour.seconds_of(step))
        del step
        for name in ("adamw", "muon"):
            hour.forget()
            with hour.loop(hour.spec(size, name=name, compile=compiled)) as (loop, _):
                told(f"atoll {name} {words}", _seconds(hour, loop.step), hour.seconds_of(loop.step))


def _matrix_flops(hour: Hour) -> float:
    """What the device reaches in a product of large bf16 matrices, FLOP per second."""
    n = 256 if hour.cpu else 8192
    a, b = (torch.randn(n, n, device=hour.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / hour.seconds_of(lambda: a @ b)


def _plain_step(hour: Hour, shape: ModelShape, size: Size, compiled: bool) -> Callable[[], object]:
    """A step as tutorials write it: fused AdamW, autocast, clipping, data that is there already."""
    with torch.device(hour.device):
        model = Decoder(shape)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if compiled and not hour.cpu else model
    tokens_BT = torch.randint(0, 256, (size.samples, size.sequence_length + 1), device=hour.device)

    def step() -> None:
        with autocast(hour.device, "bf16"):
            logits_BTV = forward(tokens_BT[:, :-1])
        nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def hot_loop(hour: Hour) -> None:
    """Waits, kernels and idle time of steps."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] if hour.cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    for size in hour.sizes(Size("125m", 1024, 16)):
        for name in ("adamw", "muon"):
            with hour.loop(hour.spec(size, name=name)) as (loop, _):
                for _ in range(4):
                    loop.step()
                places = _waits(loop.step) if not hour.cpu else []
                with profile(activities=activities) as profiled:
                    seconds = _seconds(hour, lambda loop=loop: [loop.step() for _ in range(5)])
            events = profiled.key_averages()
            kernels = sorted(
                (it for it in events if it.self_device_time_total), key=lambda it: -it.self_device_time_total
            )
            busy = sum(it.self_device_time_total for it in kernels if not it.key.startswith("aten::")) / 1e6
            hour.say(
                f"{size} {name}",
                waits_a_step=len(places),
                where=sorted(set(places)),
                profiled_step_ms=1000 * seconds / 5,
                busy_share=busy / seconds,
                launches_a_step=sum(it.count for it in events if "LaunchKernel" in it.key) // 5,
                longest=[f"{it.key[:60]}: {it.self_device_time_total / 5000:.1f} ms" for it in kernels[:10]],
            )


def _waits(step: Callable[[], object]) -> list[str]:
    """Where a step waits for the device: file and line of each."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(it.filename).name}:{it.lineno}" for it in seen if "synchronizing" in str(it.message)]


def _seconds(hour: Hour, work: Callable[[], object]) -> float:
    """Seconds of one call, with the device's work."""
    synchronize(hour.device)
    began = time.perf_counter()
    work()
    synchronize(hour.device)
    return time.perf_counter() - began


def rounds(hour: Hour) -> None:
    """What a round asks of the trainer, seconds each, with host vectors as they are, and with locked pages."""
    for size in hour.sizes(Size("125m", 1024, 16), Size("1b", 2048, 4)):
        with hour.loop(hour.spec(size)) as (loop, first_E):
            vectors = [_shared_vector(len(first_E)) for _ in range(2)]
            vectors[0].copy_(first_E)
            figures = {"pageable": _seconds_of_a_round(hour, loop, *vectors)}
            locking = _seconds(hour, lambda vectors=vectors: [lock_host_pages(it, hour.device) for it in vectors])
            figures["locked"] = _seconds_of_a_round(hour, loop, *vectors)
            hour.say(str(size), parameters=len(first_E), gb=4 * len(first_E) / 1e9, locking=locking, **figures)


def _shared_vector(elements: int) -> Tensor:
    """Memory that a daemon and its trainer share."""
    descriptor = open_anonymous_file("atoll-bench")
    allocate_vector(descriptor, elements)
    return map_vector(descriptor, elements)


def _seconds_of_a_round(hour: Hour, loop: InnerLoop, anchor_E: Tensor, gradient_E: Tensor) -> dict[str, float]:
    """Median seconds of each of a round's orders, and of raw copies of as many bytes."""
    took: dict[str, list[float]] = {}
    raw_E = torch.empty(len(anchor_E), device=hour.device)
    for _ in range(3):
        for name, work in (
            ("step", loop.step),
            ("snapshot", loop.snapshot),
            ("pseudo_gradient", lambda: loop.pseudo_gradient_into(gradient_E)),
            ("to_host", lambda: gradient_E.copy_(raw_E)),
            ("apply", lambda: loop.apply(anchor_E)),
            ("evaluate", lambda: loop.evaluate(anchor_E)),
            ("to_device", lambda: raw_E.copy_(anchor_E)),
        ):
            took.setdefault(name, []).append(_seconds(hour, work))
    return {name: float(f"{statistics.median(samples):.3g}") for name, samples in took.items()}


def memory(hour: Hour) -> None:
    """Peaks beside estimates."""
    sizes = hour.sizes(Size("125m", 1024, 16), Size("350m", 1024, 8), Size("1b", 2048, 4))
    for size in sizes:
        for name, checkpointing, precision in (
            ("adamw", False, "bf16"),
            ("muon", True, "bf16"),
            ("adamw", False, "fp32"),
        ):
            spec = hour.spec(size, name=name, activation_checkpointing=checkpointing, precision=precision)
            words = f"{size} {name} {precision}{' checkpointing' if checkpointing else ''}"
            _memory_of(hour, spec, size, words)


def _memory_of(hour: Hour, spec: RunSpec, size: Size, words: str) -> None:
    """One pair; nothing of it is left afterwards."""
    hour.forget()
    peaks: dict[str, float] = {}
    try:
        with hour.loop(spec) as (loop, anchor_E):
            estimate = loop.run.whole_model_bytes(size.samples, cuda=not hour.cpu) / _GIB
            _peaks_of_a_round(hour, loop, anchor_E, peaks)
    except torch.OutOfMemoryError as error:
        hour.say(words, out_of_memory=str(error)[:120], **peaks)
        return
    ratio = {} if hour.cpu else {"estimate_over_peak": estimate / max(peaks.values())}
    hour.say(words, estimate_gib=estimate, **ratio, **peaks)


def _peaks_of_a_round(hour: Hour, loop: InnerLoop, anchor_E: Tensor, peaks: dict[str, float]) -> None:
    loop.step()
    loop.step()
    peaks["steps_gib"] = hour.peak()
    loop.snapshot()
    out_E = torch.empty_like(anchor_E)
    loop.pseudo_gradient_into(out_E)
    loop.step()
    peaks["beside_a_snapshot_gib"] = hour.peak()
    loop.apply(anchor_E - out_E)
    loop.evaluate(anchor_E)
    peaks["evaluated_gib"] = hour.peak()


# --- processes on the device ----------------------------------------------------------------------


def swarm(hour: Hour) -> None:
    """Four daemons that share the device, beside one trainer alone."""
    size = hour.sizes(Size("125m", 1024, 8))[0]
    with hour.loop(hour.spec(size)) as (loop, _):
        alone = size.tokens / hour.seconds_of(loop.step)
    hour.say("one loop alone", tokens_per_s=alone)
    names = ("a", "b", "c", "d")
    flags = ("--device", "cpu", "--cpu-threads", "1") if hour.cpu else ("--device", "cuda:0", "--vram-fraction", "0.2")
    asyncio.run(_swarm(hour, size, dict.fromkeys(names, flags), 20_000 if hour.cpu else 1_000_000, alone))


async def _swarm(hour: Hour, size: Size, members: dict[str, tuple[str, ...]], tokens: int, alone: float) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-") as root:
        local = LocalSwarm(Path(root))
        try:
            await _started(local, hour, size, members, tokens)
            before, began = _figures(local, members), time.monotonic()
            await asyncio.sleep(15 if hour.cpu else ROUNDS_WATCHED_SECONDS)
            local.check()
            seconds, after = time.monotonic() - began, _figures(local, members)
        finally:
            await local.close()
        steps = {name: after[name]["steps"] - before[name]["steps"] for name in members}
        pace = sum(steps.values()) * size.tokens / seconds
        committed = after["a"]["round"] - before["a"]["round"]
        hour.say(
            f"{len(members)} daemons, {size}",
            tokens_per_s=pace,
            beside_one_loop=pace / alone,
            rounds=committed,
            round_s=seconds / max(1, committed),
            steps=list(steps.values()),
            restarts=sum(it["trainer_restarts"] for it in after.values()),
            abandoned=sum(it["rounds_abandoned"] for it in after.values()),
            data_stall_s=max(it["data_stall_seconds"] for it in after.values()),
            held_out=after["a"]["validation_loss"],
        )


def mixed_swarm(hour: Hour) -> None:
    """Two daemons with the device and one without: every committed round's digest was attested by all three."""
    size = Size("nano", 128, 4)
    gpu = ("--device", "cpu" if hour.cpu else "cuda:0")
    members = {"a": gpu, "b": gpu, "cpu": ("--device", "cpu", "--cpu-threads", "2")}
    asyncio.run(_mixed(hour, size, members))


async def _mixed(hour: Hour, size: Size, members: dict[str, tuple[str, ...]]) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-") as root:
        local = LocalSwarm(Path(root))
        try:
            await _started(local, hour, size, members, 4_000 if hour.cpu else 30_000, "fp32")
            first = _figures(local, members)["a"]["round"]

            def committed() -> bool:
                return min(it["round"] for it in _figures(local, members).values()) >= first + MIXED_ROUNDS

            await local.until(committed, f"no {MIXED_ROUNDS} rounds", timedelta(seconds=150))
            disks = LabSwarm(local, list(members), hour.spec(size))
            chains = [disks.chain(name) for name in members]
        finally:
            await local.close()
    held = sorted(set.intersection(*(set(chain) for chain in chains)))
    hour.say(
        "2 daemons with the device, 1 without",
        rounds=len(held),
        equal=sum(len({chain[number].head.hash for chain in chains}) == 1 for number in held),
        whole=sum(len(chains[0][number].head.present) == len(members) for number in held),
    )


async def _started(
    local: LocalSwarm,
    hour: Hour,
    size: Size,
    members: dict[str, tuple[str, ...]],
    round_tokens: int,
    precision: str = "bf16",
) -> None:
    """Start all, and wait for the first round that counts."""
    vocabulary = f"vocabulary = {VOCABULARY}\n" if size.preset != "nano" else ""
    toml = (
        f'version = 1\n[run]\nname = "{RUN}"\nmin_nodes = {len(members)}\nstop_tokens = 1000000000000\n'
        f'[model]\npreset = "{size.preset}"\n{vocabulary}'
        f'[data]\npath = "{hour.corpus}"\nsequence_length = {size.sequence_length}\nvalidation_samples = 32\n'
        f'[optimizer]\nprecision = "{precision}"\nmicro_batch_samples = {size.samples}\n'
        f'[sync]\nround_tokens = {round_tokens}\nround_growth = 1.0\ncodec = "int4"\n'
    )
    began = time.monotonic()
    await local.start_coordinator()
    await local.create_run(toml)
    await local.start_member("seed", "seed")
    await local.until(lambda: local.in_state("seed", "ready"), "the seed did not start", _READY)
    for name, flags in members.items():
        await local.start_member(name, "node", *flags)

    def trains() -> bool:
        return min(it["round"] for it in _figures(local, members).values()) >= 2

    await local.until(trains, "no second round", _READY)
    hour.say("second round", seconds=time.monotonic() - began)


def _figures(local: LocalSwarm, members: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    nothing: dict[str, Any] = {"round": -1, "steps": 0}
    return {name: local.status(name) or nothing for name in members}


def route(hour: Hour) -> None:
    """Two stages, each a trainer process on the device, beside the whole model in one."""
    size = hour.sizes(Size("125m", 1024, 8))[0]
    with hour.loop(hour.spec(size, name="adamw")) as (loop, _):
        alone = size.tokens / hour.seconds_of(loop.step)
        last = loop.run.architecture.layers - 1
    spans = (Span(0, last // 2), Span(last // 2 + 1, last))
    asyncio.run(_route(hour, size, spans, alone))


async def _route(hour: Hour, size: Size, spans: Sequence[Span], alone: float) -> None:
    micro_batches, flushes = 8, 2 if hour.cpu else 20
    spec = hour.spec(size, name="adamw")
    routed = spec.pipeline.model_copy(update={"micro_batches": micro_batches})
    toml = spec.model_copy(update={"pipeline": routed}).resolved_toml()
    hub, peers = MemoryHub(), tuple(f"stage-{stage}" for stage in range(len(spans)))
    async with AsyncExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="atoll-")))
        stages = []
        for stage, span in enumerate(spans):
            config = TrainerConfig(
                toml, str(hour.corpus), device=str(hour.device), vram_fraction=0.45, span=(span.first, span.last)
            )
            place = RoutePlace(1, 0, peers, stage)
            dispatcher = RouteDispatcher(hub.join(peers[stage]))
            stages.append(await StageProcess.start(dispatcher, place, config, directory / f"{stage}.log"))
            undo.push_async_callback(stages[-1].stop)
        began = await _stepped(stages[-1], 3)
        seconds = await _stepped(stages[-1], flushes) - began
    pace = flushes * micro_batches * size.tokens / seconds
    hour.say(f"2 stages, {size}", tokens_per_s=pace, whole_model_tokens_per_s=alone, beside_whole=pace / alone)


async def _stepped(stage: StageProcess, flushes: int) -> float:
    """Wait for so many more flushes; returns the time."""
    enough = stage.trainer.status.steps + flushes
    async with asyncio.timeout(120):
        while stage.trainer.status.steps < enough:
            if stage.trainer.died.done():
                raise stage.trainer.died.result()
            await asyncio.sleep(0.01)
    return time.monotonic()


# --- the recipe ----------------------------------------------------------------------------------


def recipe(hour: Hour) -> None:
    """Held-out losses at equal tokens, all programs at once; each is a process."""
    from benchmarks.gpu_recipe import jobs_for, train, warm_start

    jobs = jobs_for(hour.cpu)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as scratch:
        begin = Path(scratch) / "begin.pt"
        warm_start(jobs[0], hour.corpus, str(hour.device), begin)
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(2 if hour.cpu else len(jobs), context) as pool:
            running = {pool.submit(train, job, hour.corpus, str(hour.device), begin): job for job in jobs}
            losses: dict[str, float] = {}
            for done in concurrent.futures.as_completed(running):
                job = running[done]
                losses[job.name] = done.result()
                hour.say(job.name, loss=losses[job.name])
    best = {kind: min(loss for name, loss in losses.items() if name.startswith(kind)) for kind in ("AdamW", "Muon")}
    for name, loss in losses.items():
        if name.startswith("swarm"):
            beside = {f"beside_{kind}_percent": 100 * (loss / other - 1) for kind, other in best.items()}
            hour.say(f"{name} beside synchronous", **beside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part")
    parser.add_argument("lines", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--cpu", action="store_true")
    chosen = parser.parse_args()
    globals()[chosen.part](Hour(chosen.part, chosen.lines, chosen.corpus, chosen.cpu))


if __name__ == "__main__":
    main()
