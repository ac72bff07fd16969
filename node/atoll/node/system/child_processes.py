"""Children that cannot outlive us, whatever kills us.

Every child is started through a three-line Python trampoline that asks the kernel to kill it when its parent
ends (PR_SET_PDEATHSIG), checks that the parent did not end in between, and only then executes the program.
A `preexec_fn` would do the same but runs Python between fork and exec, which is not safe beside threads.
The kernel watches the *thread* that forked: start children from a thread that lives as long as they should.

Each child leads its own process group, so that Ctrl-C reaches us alone and a stop reaches all of its own
children. `stop` asks with SIGTERM and insists with SIGKILL after a deadline.
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

KILL_TIMEOUT = timedelta(seconds=5)  # from SIGKILL until the kernel reports the end

Output = int | IO[bytes] | None  # as `subprocess` takes it: PIPE, DEVNULL, STDOUT, a file, or None to inherit


def command_killed_with_parent(command: Sequence[str | Path], parent_pid: int) -> list[str]:
    """`command` (an absolute path and arguments) so wrapped that it dies with the process `parent_pid`."""
    return [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(parent_pid), *map(str, command)]


def treat_sigterm_as_sigint() -> None:
    """SIGTERM ends this process like Ctrl-C: what it holds is let go, also where a shell ignores that for it."""
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
    """Start `command` as a child that dies with us, in its own process group. Raises `OSError`."""
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
    """SIGTERM to the child's group, SIGKILL after `grace`; returns the exit status. Ended already is fine."""
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
