"""`eventually`: wait until a condition holds, with a deadline that grows with what this machine is doing now."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

POLL_SECONDS = 0.01
_COUNTED = 3.0  # times a pause may take what it was asked for; the rest is the machine's and does not count


async def eventually(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Return once `condition()` is true; fail after `seconds` of undisturbed waiting.

    A pause that takes longer than it was asked for means that this process, or the whole machine, stood still or is
    busy. What it took longer is not counted, so a stall of some seconds costs a test time and not its verdict.
    """
    loop = asyncio.get_running_loop()
    waited = 0.0
    while not condition():
        if waited >= seconds:
            source = inspect.getsource(condition).strip() if inspect.isfunction(condition) else repr(condition)
            raise AssertionError(f"not true after {seconds:g} s of undisturbed waiting: {source}")
        before = loop.time()
        await asyncio.sleep(POLL_SECONDS)
        waited += min(loop.time() - before, _COUNTED * POLL_SECONDS)
