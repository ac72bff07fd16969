"""`atoll logs`: print the daemon's log, which has all that its terminal shows, or the trainer's."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer

from atoll.core.errors import NotFound
from atoll.node.cli.options import DataDir, data_directory
from atoll.node.config import LOG_FILE
from atoll.node.control.run_directories import run_directories

Format = Annotated[
    Literal["auto", "console", "json"],
    typer.Option("--log-format", help="Format of the output. auto: console on a terminal, else json, as in the file."),
]


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    trainer: Annotated[
        bool, typer.Option("--trainer", help="Print the trainer's log of the newest run instead.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines to print, from the end of the log.")
    ] = 50,
    log_format: Format = "auto",
    data_dir: DataDir = None,
) -> None:
    """Print the daemon's log, with everything that its terminal shows."""
    path = _trainer_log(data_directory(data_dir)) if trainer else data_directory(data_dir) / LOG_FILE
    if not path.is_file():
        raise NotFound(
            f"there is no log {path}", "start the node with `atoll join` or `atoll up`, or correct --data-dir"
        )
    human = sys.stdout.isatty() if log_format == "auto" else log_format == "console"
    _print(path, lines, follow, _line_formatter() if human else str)


def _trainer_log(where: Path) -> Path:
    logs = [path / "trainer.log" for path in run_directories(where)]
    found = sorted((path for path in logs if path.is_file()), key=lambda path: path.stat().st_mtime)
    if not found:
        raise NotFound(
            f"no trainer's log under {where}", "wait until the node starts its trainer, or correct --data-dir"
        )
    return found[-1]


def _line_formatter() -> Callable[[str], str]:
    from atoll.core import log  # here, because structlog takes long to import

    return log.json_line_formatter(sys.stdout.isatty())


def _print(path: Path, lines: int, follow: bool, format_line: Callable[[str], str]) -> None:
    """Print the last complete lines.

    With `follow`, an incomplete line is printed once it is complete, else at the end.
    """
    file = path.open(errors="replace")
    try:
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
            elif _was_moved(file, path):
                file.close()
                file = path.open(errors="replace")
            else:
                time.sleep(0.2)
        if partial_line:
            typer.echo(format_line(partial_line))
    finally:
        file.close()


def _was_moved(file: TextIO, path: Path) -> bool:
    """Whether a new file has replaced this one. The caller has read this file to its end."""
    try:
        return os.stat(path).st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
