"""BackgroundTasks: asyncio tasks that belong to one owner. Each ends with its owner, and every failure is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from atoll.core import log

_log = log.get("tasks")


class BackgroundTasks:
    """The running background tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task. An exception is logged, not raised: the owner has deadlines that notice a failure."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("background task failed", error=repr(task.exception()))
