"""The parts of `gpu_hour`, each run in a process of its own: `python -m benchmarks.gpu_parts PART LINES CORPUS`.

`speed`: steps of the inner loop beside a plain loop that trains the same model, compiled and not. `hot_loop`: how often
a step waits for the device, and how much of the time it computes. `rounds`: how long what a round asks of the
trainer stops it, beside raw copies. `memory`: the peak through steps, snapshot, apply and evaluation, beside the
estimate by which a node refuses a model. `gpu_swarms.py` and `gpu_recipe.py` have the others.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.core.built_in_shape import ModelShape, resolve_shape
from atoll.core.files import open_anonymous_file
from atoll.core.run_spec import RunSpec
from atoll.node.model.llama import Decoder
from atoll.node.system.shared_vectors import allocate_vector, map_vector
from atoll.node.training.device import autocast, lock_host_pages
from atoll.node.training.loop import InnerLoop
from benchmarks.gpu_recipe import recipe
from benchmarks.gpu_session import GIB, Hour, Size
from benchmarks.gpu_swarms import mixed_swarm, route, swarm


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
        told(f"plain adamw {words}", hour.seconds(step), hour.seconds_of(step))
        del step
        for name in ("adamw", "muon"):
            hour.forget()
            with hour.loop(hour.spec(size, name=name, compile=compiled)) as (loop, _):
                told(f"atoll {name} {words}", hour.seconds(loop.step), hour.seconds_of(loop.step))


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
                    seconds = hour.seconds(lambda loop=loop: [loop.step() for _ in range(5)])
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


def rounds(hour: Hour) -> None:
    """What a round asks of the trainer, seconds each, with host vectors as they are, and with locked pages."""
    for size in hour.sizes(Size("125m", 1024, 16), Size("1b", 2048, 4)):
        with hour.loop(hour.spec(size)) as (loop, first_E):
            vectors = [_shared_vector(len(first_E)) for _ in range(2)]
            vectors[0].copy_(first_E)
            figures = {"pageable": _seconds_of_a_round(hour, loop, *vectors)}
            locking = hour.seconds(lambda vectors=vectors: [lock_host_pages(it, hour.device) for it in vectors])
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
            took.setdefault(name, []).append(hour.seconds(work))
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
            estimate = loop.run.whole_model_bytes(size.samples, cuda=not hour.cpu) / GIB
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


PARTS: dict[str, Callable[[Hour], None]] = {
    part.__name__: part for part in (tests, speed, hot_loop, rounds, memory, swarm, mixed_swarm, route, recipe)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("lines", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--cpu", action="store_true")
    chosen = parser.parse_args()
    PARTS[chosen.part](Hour(chosen.part, chosen.lines, chosen.corpus, chosen.cpu))


if __name__ == "__main__":
    main()
