"""`atoll logs`: the trainer's log; the daemon's own goes to stderr (journald keeps it under systemd)."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from atoll.core.errors import NotFound
from atoll.node.cli.options import DataDir, data_directory

Format = Annotated[
    Literal["auto", "console", "json"],
    typer.Option("--log-format", help="auto: console on a terminal, else json, as it is in the file"),
]


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing what comes.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    log_format: Format = "auto",
    data_dir: DataDir = None,
) -> None:
    """Print the trainer's log of the newest run (the daemon logs to stderr: `journalctl -u atoll-node`)."""
    where = data_directory(data_dir)
    found = sorted(where.glob("runs/*/trainer.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise NotFound(f"no log under {where}", "the node has not started training yet, or --data-dir is another")
    human = sys.stdout.isatty() if log_format == "auto" else log_format == "console"
    _print(found[-1], lines, follow, _line_formatter() if human else str)


def _line_formatter() -> Callable[[str], str]:
    from atoll.core import log  # structlog takes long to import: only for who needs it

    return log.json_line_formatter(sys.stdout.isatty())


def _print(path: Path, lines: int, follow: bool, format_line: Callable[[str], str]) -> None:
    """The last lines, whole; what is still being written comes with `follow`, or once at the end."""
    with path.open(errors="replace") as file:
        last = deque(file, maxlen=lines + 1)
        partial_line = last.pop() if last and not last[-1].endswith("\n") else ""
        if len(last) > lines:
            last.popleft()
        for line in last:
            typer.echo(format_line(line.removesuffix("\n")))
        while follow:
            partial_line += file.readline()
            if partial_line.endswith("\n"):
                typer.echo(format_line(partial_line.removesuffix("\n")))
                partial_line = ""
            else:
                time.sleep(0.2)
        if partial_line:
            typer.echo(format_line(partial_line))
