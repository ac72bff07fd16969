"""The answering side of `lab_members`: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def serve(answer: Answer) -> None:
    """Answer requests until the input ends. Whatever libraries print goes to the log, not among the answers.

    The input has a reader of its own: a process that a library forks would wait for the lock of `sys.stdin` for ever.
    """
    out, sys.stdout = sys.stdout, sys.stderr
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        with open(0, closefd=False) as requests:
            for line in requests:
                loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    threading.Thread(target=read, daemon=True).start()
    while line := await lines.get():
        out.write(json.dumps(await answer(json.loads(line))) + "\n")
        out.flush()
