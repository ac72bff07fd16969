"""Text for byte counts, counts, layers and durations, and the parser of durations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta

from atoll.core.errors import UsageError

MAX_DURATION = timedelta(days=3650)
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def bytes_text(count: float) -> str:
    """`1536` → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def count_text(count: float) -> str:
    """`1234567` → "1.23 M"."""
    for unit in ("", " k", " M", " G"):
        if abs(count) < 1000:
            return f"{count:.0f}" if not unit else f"{count:.2f}{unit}"
        count /= 1000
    return f"{count:.2f} T"


def layers_text(numbers: Iterable[int]) -> str:
    """`{0, 1, 2, 5}` → "layers 0-2, 5"."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"layer{'' if one else 's'} " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def duration_text(seconds: float) -> str:
    """`3725` → "1 h 02 min"."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def parse_duration(text: str) -> timedelta:
    """`"30m"`, `"2h"`, `"1.5d"`, `"250ms"`; at most ten years. Raises `UsageError`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a duration", "write for example 30s, 15m, 2h or 1d")
    seconds = float(match["number"]) * _SECONDS[match["unit"]]
    if seconds > MAX_DURATION.total_seconds():
        raise UsageError(f"{text[:40]!r} is longer than ten years, the maximum", "write for example 30s, 15m, 2h or 1d")
    return timedelta(seconds=seconds)
