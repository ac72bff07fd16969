"""The common form of benchmarks: cells measured in one run, acceptance rows with targets, a table and a JSON file.

report = Report("codecs")
report.cell(codec="int4", encode_mb_per_second=812.0)
report.accept("int4 error", target="≤ 0.08", value=error, holds=error <= 0.08)
report.finish()
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the figures came from, without naming the host."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = named[0] if named else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def median_seconds(
    work: Callable[[], object], repetitions: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median seconds of `work` on that clock (the wall's), after one run that is not counted."""
    work()
    samples = []
    for _ in range(repetitions):
        start = clock()
        work()
        samples.append(clock() - start)
    return statistics.median(samples)


class Report:
    """Collects what a benchmark measures, prints it, and keeps it."""

    def __init__(self, benchmark: str) -> None:
        self.benchmark = benchmark
        self.cells: list[dict[str, Any]] = []
        self.acceptance: list[dict[str, Any]] = []

    def cell(self, **values: Any) -> None:
        """One measured row; all rows of a benchmark have the same keys."""
        self.cells.append(values)

    def accept(self, name: str, *, target: str, value: Any, holds: bool) -> None:
        """One acceptance row: what was promised, what was measured."""
        self.acceptance.append({"name": name, "target": target, "value": value, "holds": bool(holds)})

    def finish(self, notes: str = "", *, keep: bool = True) -> None:
        """Print the tables and write `results/NAME.json`, unless it is not to be kept."""
        console = Console(width=140, highlight=False)
        console.print(_table(self.benchmark, self.cells))
        if self.acceptance:
            console.print(_table("acceptance", self.acceptance))
        if not keep:
            return
        RESULTS.mkdir(exist_ok=True)
        document = {
            "benchmark": self.benchmark,
            "date": dt.date.today().isoformat(),
            "machine": machine(),
            "notes": notes,
            "cells": self.cells,
            "acceptance": self.acceptance,
        }
        (RESULTS / f"{self.benchmark}.json").write_text(json.dumps(document, indent=2) + "\n")


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for key in rows[0] if rows else ():
        table.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    return table


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
