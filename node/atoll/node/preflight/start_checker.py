"""Start of the checker process (`checker.py`), and its answer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta

from atoll.core import log, sdnotify
from atoll.core.errors import ChildDied, DeadlineExceeded, error_class
from atoll.node.preflight.run_checks import Found, Request
from atoll.node.system import child_processes

SILENCE_TIMEOUT = timedelta(minutes=10)  # between two lines of progress
_STOP_TIMEOUT = timedelta(seconds=2)
# systemd's `TimeoutStartSec` is too short for terabytes of text and weights
_MORE_TIME = "EXTEND_TIMEOUT_USEC=60000000"
_TOLD_EVERY = 10  # lines of progress

_log = log.get("preflight")


async def check_run_apart(request: Request) -> Found:
    """Run the checks in a separate process. Raises its error, `ChildDied`, `DeadlineExceeded`."""
    child = await child_processes.start(
        [sys.executable, "-P", "-m", "atoll.node.preflight.checker"],
        environment=os.environ,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        await child.stdin.drain()
        return await _answer(child.stdout)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ChildDied("the check of this machine ended without an answer") from error
    finally:
        await child_processes.stop(child, _STOP_TIMEOUT)


async def _answer(lines: asyncio.StreamReader) -> Found:
    told = 0
    while True:
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT.total_seconds()):
                line = await lines.readline()
            sdnotify.notify(os.environ.get("NOTIFY_SOCKET", ""), _MORE_TIME)
        except ValueError as error:  # a line without an end
            raise ChildDied("the check of this machine answered too much", "see what it printed") from error
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the check of this machine did not go on for {SILENCE_TIMEOUT.total_seconds() / 60:.0f} minutes",
                "check the disk of the training text and the GPU's driver",
            ) from error
        if not line:
            raise ChildDied("the check of this machine ended without an answer", "see what it printed")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ChildDied(f"the check of this machine answered {line[:80]!r}", "see what it printed") from error
        if "found" in message:
            return Found(**message["found"])
        if "error" in message:
            problem = message["error"]
            raise error_class(problem["reason"])(problem["message"], problem["remedy"])
        if told % _TOLD_EVERY == 0:
            _log.info("reading", what=message["progress"]["what"], so_far=message["progress"]["count"])
        told += 1
