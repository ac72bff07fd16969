"""Work that runs beside the rounds. None of it outlives its owner, and none that fails is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from atoll.core import log

_log = log.get("rounds")


class BackgroundTasks:
    """A set of tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it; what it raises is logged, because the round has deadlines that notice."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """Cancel all and wait for their end."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("work beside the rounds failed", error=repr(task.exception()))
