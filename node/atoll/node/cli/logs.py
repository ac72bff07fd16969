"""`atoll logs`: print the trainer's log. The daemon logs to stderr, which journald keeps under systemd."""

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
    typer.Option("--log-format", help="auto: console on a terminal, else json, the format of the file."),
]


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines.")] = 50,
    log_format: Format = "auto",
    data_dir: DataDir = None,
) -> None:
    """Print the trainer's log of the newest run (the daemon logs to stderr: `journalctl -u atoll-node`)."""
    where = data_directory(data_dir)
    found = sorted(where.glob("runs/*/trainer.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise NotFound(
            f"no trainer's log under {where}", "wait until the node starts its trainer, or correct --data-dir"
        )
    human = sys.stdout.isatty() if log_format == "auto" else log_format == "console"
    _print(found[-1], lines, follow, _line_formatter() if human else str)


def _line_formatter() -> Callable[[str], str]:
    from atoll.core import log  # here, because structlog takes long to import

    return log.json_line_formatter(sys.stdout.isatty())


def _print(path: Path, lines: int, follow: bool, format_line: Callable[[str], str]) -> None:
    """Print the last complete lines. An incomplete line follows once it is complete with `follow`, else at the end."""
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
