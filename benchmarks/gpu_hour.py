"""One session on one GPU: what must be known before a lab's first run, the most worth knowing first.

    python -m benchmarks.gpu_hour [--cpu] [--parts tests speed …] [--seconds 3600] [--output DIRECTORY]

Each part (`gpu_parts.py`) is a process of its own with a time limit, and writes a line as soon as it knows a figure.
So a part that runs out of memory, loses the device or hangs costs only what it had not yet measured. Parts that run
again replace their lines in the output directory; those of others stay. With `--cpu` all parts run with models of next
to nothing: that shows that the program works, and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from atoll.node.system import child_processes
from benchmarks.common import Report
from benchmarks.gpu_session import write_corpus

PARTS = {  # seconds at most, in order of worth
    "tests": 420,
    "speed": 900,
    "hot_loop": 120,
    "rounds": 240,
    "memory": 420,
    "swarm": 400,
    "mixed_swarm": 240,
    "route": 240,
    "recipe": 900,
}
_END_GRACE = timedelta(seconds=10)
_LAST_LINES = 12


def main() -> None:
    """Run the parts, print the figures, keep them."""
    arguments = _arguments()
    report = asyncio.run(_measure(arguments))
    judge(report)
    report.finish(_notes(arguments), keep=not arguments.cpu)


async def _measure(arguments: argparse.Namespace) -> Report:
    report, began = Report("gpu_hour"), time.monotonic()
    arguments.output.mkdir(parents=True, exist_ok=True)
    figures = arguments.output / "gpu_hour.jsonl"
    earlier = figures.read_text().splitlines(keepends=True) if figures.exists() else []
    figures.write_text("".join(line for line in earlier if json.loads(line)["part"] not in arguments.parts))
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as scratch:
        corpus = Path(scratch) / "corpus.txt"
        write_corpus(corpus, arguments.cpu)
        for part in arguments.parts:
            left = arguments.seconds - (time.monotonic() - began)
            if left > 0:
                await _run_part(part, min(PARTS[part], left), figures, corpus, arguments)
    for line in figures.read_text().splitlines():
        cell = json.loads(line)
        report.cell(part=cell.pop("part"), case=cell.pop("case"), figures=cell)
    return report


async def _run_part(part: str, seconds: float, figures: Path, corpus: Path, arguments: argparse.Namespace) -> None:
    """Run a part to its end or its limit, and write how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu_parts", part, str(figures), str(corpus)]
    began, log = time.monotonic(), arguments.output / f"{part}.log"
    with log.open("wb") as output:
        child = await child_processes.start(
            [*command, "--cpu"] if arguments.cpu else command,
            environment={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=output,
        )
        try:
            async with asyncio.timeout(seconds):
                status: int | str = await child.wait()
        except TimeoutError:
            status = f"stopped after its {seconds:.0f} s"
        finally:
            await child_processes.stop(child, _END_GRACE)
    ended: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "exit": status}
    if status != 0:
        ended["log"] = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    line = json.dumps({"part": part, "case": "end", **ended})
    with figures.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def judge(report: Report) -> None:
    """Acceptance rows of what ran."""
    found = {(cell["part"], cell["case"]): cell["figures"] for cell in report.cells}
    for part in PARTS:
        if (ended := found.get((part, "end"))) is not None:
            report.accept(f"{part} ran to its end", target="0", value=ended["exit"], holds=ended["exit"] == 0)
    tests = found.get(("tests", "tests/gpu"))
    if tests is not None and tests["passed"] + len(tests["failed"]):  # without a device all are skipped
        failed = ", ".join(tests["failed"])
        report.accept("tests of tests/gpu", target="all pass", value=failed or tests["passed"], holds=not failed)
    for (part, case), figures in found.items():
        if part == "memory" and "estimate_over_peak" in figures:
            value = figures["estimate_over_peak"]
            report.accept(
                f"memory of {case}: estimate / peak", target="1 … 1.05", value=value, holds=1 <= value <= 1.05
            )
        if part == "hot_loop" and "waits_a_step" in figures:
            value = figures["waits_a_step"]
            report.accept(f"{case}: waits for the device in a step", target="≤ 1", value=value, holds=value <= 1)


def _notes(arguments: argparse.Namespace) -> str:
    if arguments.cpu:
        return "on a CPU: shows that the program works, and measures nothing"
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.total_memory >> 30} GiB, torch {torch.__version__}. mfu: 6 FLOP for each "
        "parameter and token, and those of causal attention, over what a product of 8192×8192 bf16 matrices reaches"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=3600, help="for all parts together")
    parser.add_argument(
        "--output", type=Path, default=Path(tempfile.gettempdir()) / "atoll-gpu-hour", help="of lines and logs"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
