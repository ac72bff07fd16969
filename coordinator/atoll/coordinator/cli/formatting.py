"""Formats of the values that tables show."""

from __future__ import annotations

import time

from atoll.core.units import bytes_text, count_text, duration_text


def time_ago(unix_ms: int, now: float) -> str:
    """`3 s ago`, or a dash for 0."""
    return "–" if not unix_ms else f"{duration_text(max(0.0, now - unix_ms / 1000))} ago"


def time_until(unix_ms: int, now: float) -> str:
    """`in 12 min 03 s`, or `expired`."""
    left = unix_ms / 1000 - now
    return f"in {duration_text(left)}" if left > 0 else "expired"


def local_time(unix_ms: int) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ms / 1000))


def count_or_dash(number: float) -> str:
    """`1.23 M`, or a dash for 0."""
    return count_text(number) if number else "–"


def size_or_dash(number: float) -> str:
    """`1.5 KiB`, or a dash for 0."""
    return bytes_text(number) if number else "–"


def loss_or_dash(value: float) -> str:
    """Four decimals, or a dash for 0."""
    return f"{value:.4f}" if value else "–"
