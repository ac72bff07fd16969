"""`atollctl plan what-if`: run the planner on a file of machines, without a coordinator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from atoll.coordinator.cli.output import Column, JsonObject, print_sentences, show
from atoll.coordinator.planner.explain import Explanation, StagePlacement, explain
from atoll.coordinator.planner.layout_svg import layout_svg
from atoll.coordinator.planner.report import document, sentences
from atoll.coordinator.planner.solve import Solution, solve
from atoll.coordinator.planner.what_if import read_what_if
from atoll.core.clock import SystemClock
from atoll.core.errors import ConfigError
from atoll.core.output import Output

EXPLAIN_TIME_FRACTION = 0.5  # share of the search time that is used again to find improvements
COLUMNS = [
    Column("route", align_right=True),
    Column("region", align_right=True),
    Column("machine"),
    Column("layers"),
    Column("memory", align_right=True),
    Column("computes", align_right=True),
    Column("GB a day", "gigabytes", align_right=True),
    Column("waits for", "waits_for", prose=True),
]


def plan_file(path: Path, seconds: float, output: Output, svg: Path | None = None) -> None:
    """Plan, explain, print, draw. Raises `ConfigError` for an unreadable or unwritable file, and planner errors."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"cannot read {path}: {reason}") from error
    check_writable(svg)
    clock, rng = SystemClock(), random.Random(0)
    found = solve(read_what_if(text, path.name), clock=clock, rng=rng, seconds=seconds)
    why = explain(found, clock=clock, rng=rng, seconds=EXPLAIN_TIME_FRACTION * seconds)
    draw(svg, found, why)
    show(output, {"plan": document(found, why)}, COLUMNS, rows(why.places))
    if output is Output.TEXT:
        print()
        print_sentences(sentences(found, why))


def check_writable(path: Path | None) -> None:
    """Check the path before a search of minutes; creates no file. Raises `ConfigError`."""
    if path is None:
        return
    try:
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def draw(path: Path | None, found: Solution, why: Explanation) -> None:
    """Write the drawing to `path`, if one was given. Raises `ConfigError`."""
    if path is None:
        return
    try:
        path.write_text(layout_svg(found, why), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def rows(places: Sequence[StagePlacement]) -> list[JsonObject]:
    """Table rows: the span, memory and waiting of each machine."""
    return [
        {
            "route": place.route + 1,
            "region": place.region + 1,
            "machine": place.machine,
            "layers": f"{place.first}–{place.last}",
            "memory": f"{place.memory_bytes / 1e9:.1f} of {place.memory_lent_bytes / 1e9:.1f} GB",
            "computes": f"{100 * place.computing:.0f} %",
            "gigabytes": f"{place.bytes_per_day / 1e9:.0f}",
            "waits_for": place.waits_for,
        }
        for place in places
    ]
