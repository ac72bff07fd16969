"""`--detach`: start the daemon in the background, and wait until it answers."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import typer

from atoll.core.errors import AtollError
from atoll.core.output import print_to_stderr
from atoll.node.config import LOG_FILE
from atoll.node.control.local_client import call

_MODULE = "atoll.node.cli.detached"
_PATIENCE = timedelta(minutes=2)  # importing torch takes long on a slow disk
_POLL_SECONDS = 0.2
_MOST_TOLD_BYTES = 8192


def start_detached(data_dir: Path, config_file: Path | None) -> None:
    """Start the daemon of `data_dir` in a separate session. If it fails, end this command with its exit code."""
    command = [sys.executable, "-P", "-m", _MODULE, str(data_dir)]
    command += [str(config_file.absolute())] if config_file is not None else []
    log = data_dir / LOG_FILE
    before = log.stat().st_size if log.exists() else 0
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    ends = time.monotonic() + _PATIENCE.total_seconds()
    while time.monotonic() < ends:
        if child.poll() is not None:
            print_to_stderr(f"The node ended at once. Its log: atoll logs --data-dir {data_dir}\n{_told(log, before)}")
            raise typer.Exit(child.returncode if child.returncode > 0 else 1)
        try:
            if call(data_dir, "status")["pid"] == child.pid:
                break
        except AtollError:
            pass
        time.sleep(_POLL_SECONDS)
    _greet(data_dir, child.pid)


def _told(log: Path, start: int) -> str:
    """The end of what the process has written for people since its log had `start` bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - _MOST_TOLD_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.isprintable() and not line.startswith("{"))


def _greet(data_dir: Path, pid: int) -> None:
    where = f" --data-dir {data_dir}"
    print_to_stderr(f"The node runs in the background (process {pid}). It goes on when this terminal closes.")
    print_to_stderr(f"See `atoll status{where}` and `atoll logs -f{where}`; stop it with `atoll finish{where}`.")
