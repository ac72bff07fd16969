"""Child processes that never outlive this process, even if it is killed.

Every child starts through a three-line Python trampoline. It asks the kernel to kill the child when its parent ends
(PR_SET_PDEATHSIG), checks that the parent has not ended before that, and then executes the program. A `preexec_fn`
would do the same, but it runs Python between fork and exec, which is unsafe in a process with threads. The kernel
watches the *thread* that forked, so start a child from a thread that lives as long as the child should.

Each child leads its own process group: Ctrl-C reaches only this process, and `stop` reaches the child's own children.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

_TRAMPOLINE = """
import ctypes, os, sys
ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
os.execv(sys.argv[2], sys.argv[2:]) if os.getppid() == int(sys.argv[1]) else sys.exit(1)
"""

KILL_TIMEOUT = timedelta(seconds=5)  # between SIGKILL and the child's exit status

Output = int | IO[bytes] | None  # as in `subprocess`: PIPE, DEVNULL, STDOUT, a file, or None to inherit


def command_killed_with_parent(command: Sequence[str | Path], parent_pid: int) -> list[str]:
    """Wrap `command` (an absolute path and arguments) so that it is killed when process `parent_pid` ends."""
    return [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(parent_pid), *map(str, command)]


def treat_sigterm_as_sigint() -> None:
    """Make SIGTERM raise KeyboardInterrupt like Ctrl-C, so that this process cleans up.

    Also restores SIGINT, which a shell ignores in background jobs.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))


async def start(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    stdin: Output = asyncio.subprocess.DEVNULL,
    stdout: Output = None,
    stderr: Output = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start `command` in its own process group, as a child that is killed when this process ends. Raises `OSError`."""
    return await asyncio.create_subprocess_exec(
        *command_killed_with_parent(command, os.getpid()),
        env=dict(environment),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        pass_fds=tuple(pass_fds),
        process_group=0,
    )


async def stop(child: asyncio.subprocess.Process, grace: timedelta) -> int:
    """Send SIGTERM to the child's group and SIGKILL after `grace`; return the exit status.

    The child may have ended already.
    """
    if child.returncode is None:
        signal_group(child, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace.total_seconds()):
                return await child.wait()
        signal_group(child, signal.SIGKILL)
    async with asyncio.timeout(KILL_TIMEOUT.total_seconds()):
        return await child.wait()


def signal_group(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to everything in the child's process group, if the child still runs."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
