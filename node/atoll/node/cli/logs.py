"""`atoll logs`: the trainer's log; the daemon's own goes to stderr (journald keeps it under systemd)."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from atoll.core.errors import NotFound
from atoll.node.cli.options import DataDir, directory


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing what comes.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    data_dir: DataDir = None,
) -> None:
    """Print the trainer's log of the newest run (the daemon logs to stderr: `journalctl -u atoll-node`)."""
    where = directory(data_dir)
    found = sorted(where.glob("runs/*/trainer.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise NotFound(f"no log under {where}", "the node has not started training yet, or --data-dir is another")
    _print(found[-1], lines, follow)


def _print(path: Path, lines: int, follow: bool) -> None:
    with path.open(errors="replace") as file:
        for line in deque(file, maxlen=lines):
            typer.echo(line, nl=False)
        while follow:
            line = file.readline()
            if line:
                typer.echo(line, nl=False)
            else:
                time.sleep(0.2)
