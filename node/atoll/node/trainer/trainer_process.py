"""Start of a trainer's process, before it gets its configuration, with the resources that it shares with the daemon.

Nothing here imports torch. The daemon starts the process first, so that daemon and trainer import torch in parallel.
The trainer then loads its model while the daemon joins the swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

from atoll.core.errors import DataDirUnusable
from atoll.core.files import open_anonymous_file
from atoll.core.rotating_log import MOST_BYTES

WORKER_MODULE = "atoll.node.trainer.worker"
LOG_NAME = "trainer.log"
_KILL_TIMEOUT = timedelta(seconds=10)
_LOG_TAIL_BYTES = 4096


@dataclass
class TrainerProcess:
    """A running trainer process, created by `start`. Its owner passes it to `Trainer.take`, or calls `end`."""

    process: asyncio.subprocess.Process
    control: socket.socket
    stage_socket: socket.socket  # for messages between this stage and the other stages of its route
    vector_fds: Sequence[int]  # descriptors of anonymous files: anchor and pseudo-gradient
    log_path: Path
    log_start: int  # size of the log file before this process wrote to it
    claimed: bool = False  # a trainer took this process, or `end` ended it

    @classmethod
    async def start(cls, log_path: Path, program: str = WORKER_MODULE) -> TrainerProcess:
        """Start the process; returns at once. Its output is appended to `log_path`. Raises `DataDirUnusable`."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as lent:
            log = lent.enter_context(_open_log(log_path))
            (control, far_control), (stage_socket, far_stage_socket) = socket.socketpair(), socket.socketpair()
            for ours, theirs in ((control, far_control), (stage_socket, far_stage_socket)):
                undo.callback(ours.close)
                lent.enter_context(theirs)
            vector_fds = [open_anonymous_file("atoll-anchor"), open_anonymous_file("atoll-pseudo-gradient")]
            for descriptor in vector_fds:
                undo.callback(os.close, descriptor)
            log_start = log.seek(0, os.SEEK_END)
            passed = [far_control.fileno(), far_stage_socket.fileno(), *vector_fds]
            names = ("--control-fd", "--stage-fd", "--anchor-fd", "--gradient-fd")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", program, f"--parent-pid={os.getpid()}"),
                *(f"{name}={descriptor}" for name, descriptor in zip(names, passed, strict=True)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=passed,
            )
            undo.pop_all()
        return cls(process, control, stage_socket, vector_fds, log_path, log_start)

    def release(self, *, keep_stage_socket: bool) -> None:
        """Close the descriptors that are no longer needed.

        Later calls do nothing, since the numbers may have been reused.
        """
        if self.claimed:
            return
        self.claimed = True
        for descriptor in self.vector_fds:
            os.close(descriptor)
        if not keep_stage_socket:
            self.stage_socket.close()

    def kill(self) -> None:
        """Kill the process with SIGKILL.

        `process.kill()` must not be used: it polls and may reap the child, and asyncio's watcher then misses the
        child's end.
        """
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill a process that no trainer took and wait for its end. Does nothing if a trainer took it."""
        if self.claimed:
            return
        self.release(keep_stage_socket=False)
        self.control.close()
        self.kill()
        async with asyncio.timeout(_KILL_TIMEOUT.total_seconds()):
            await self.process.wait()

    def last_line(self) -> str:
        """Last line that the process printed; empty when there is none."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(self.log_start, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
                lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip() if lines else ""


def _open_log(path: Path) -> BinaryIO:
    try:
        if path.exists() and path.stat().st_size > MOST_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
        return path.open("ab")
    except OSError as error:
        raise DataDirUnusable(
            f"cannot write the trainer's log {path}: {error.strerror}",
            "check space and permissions of the data directory",
        ) from error
