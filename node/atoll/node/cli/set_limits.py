"""`atoll set`: change the limits of a node, running or not. `limits_text` shows them in one line for `join`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Annotated, Any

import typer

from atoll.core.errors import NotRunning, UsageError
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.node.cli.options import DataDir, load_settings
from atoll.node.config import NodeConfig, limits_of, save_overrides, with_limits
from atoll.node.control.local_client import call

_TIMEOUT = timedelta(seconds=60)  # a trainer applies limits between two steps
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY VALUE]...", help="Limits and their new values. Without arguments, the command lists all limits."
    ),
]


def set_(words: Words = None, data_dir: DataDir = None, output: OutputOption = Output.TEXT) -> None:
    """Change limits of this node, whether it runs or not. If one value is invalid, no limit changes.

    Examples:

      atoll set

      atoll set upload_mbit_per_second 20 monthly_gigabytes 200

      atoll set hours 22:00-07:00,12:30-13:30 on_battery train
    """
    changes = _pairs(words or [])
    loaded = load_settings(data_dir, None)
    try:
        answer = call(loaded.config.data_dir, "set", _TIMEOUT, limits=changes)
    except NotRunning:
        answer = {"limits": limits_of(with_limits(loaded, changes)), "warnings": []}
        if changes:
            save_overrides(with_limits(loaded, changes))
            print_to_stderr("No daemon is running; the change takes effect at its next start.")
    if output is Output.JSON:
        print_json({"set": answer})
        return
    _print(answer, tuple(changes))


def limits_text(config: NodeConfig) -> str:
    """Describe every limit in one line, for people."""
    parts = [f"device {config.device}", f"{config.cpu_threads or os.cpu_count() or 1} CPU threads"]
    pace = config.minimum_step_seconds
    parts.append(f"at most one step every {pace:g} s" if pace else "full pace")
    if config.compute_share < 1:
        parts.append(f"{config.compute_share:.0%} of the time")
    if config.vram_fraction < 1:
        parts.append(f"{config.vram_fraction:.0%} of the GPU's memory")
    if config.memory_megabytes:
        parts.append(f"{config.memory_megabytes:g} MB of main memory")
    if config.power_watts:
        parts.append(f"{config.power_watts:g} W")
    rates = (config.upload_mbit_per_second, config.download_mbit_per_second)
    up, down = (f"{rate:g} Mbit/s" if rate else "no limit" for rate in rates)
    parts.append(f"upload {up}, download {down}")
    parts.append(f"{config.monthly_gigabytes:g} GB a month" if config.monthly_gigabytes else "no monthly limit")
    parts.append(f"at {config.hours}" if config.hours else "at all hours")
    if config.only_when_idle_minutes:
        parts.append(f"after {config.only_when_idle_minutes} min without other use")
    parts.append("not on battery" if config.on_battery == "pause" else "also on battery")
    return ", ".join(parts)


def _pairs(words: list[str]) -> dict[str, str]:
    if len(words) % 2:
        raise UsageError(
            f"{words[-1]!r} has no value", "write: atoll set KEY VALUE [KEY VALUE]...; `atoll set` lists the limits"
        )
    return {key.replace("-", "_"): value for key, value in zip(words[::2], words[1::2], strict=True)}


def _print(answer: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key, item in answer["limits"].items():
        if not keys or key in keys:
            value = item["value"] if item["value"] != "" else '""'
            typer.echo(f"{key:<26} {value!s:<16} # {item['origin']}")
    for warning in answer["warnings"]:
        print_to_stderr(f"warning: {warning}")
