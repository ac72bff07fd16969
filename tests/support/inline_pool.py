"""A pool of no processes: tasks run here, and end in an order that a seed decides."""

from __future__ import annotations

import random
from typing import Any

from atoll.node.system.worker_pool import Task, WorkerPool


class InlinePool(WorkerPool[Any]):
    """Runs each task when it is submitted or when it is waited for, as `chance` likes."""

    def __init__(self, workers: int, remedy: str = "", chance: random.Random | None = None) -> None:
        super().__init__(workers, remedy)
        self._chance = chance or random.Random(0)
        self._free = workers
        self._tasks: list[Task[Any]] = []

    def __enter__(self) -> InlinePool:
        return self

    @property
    def idle(self) -> int:
        return self._free - len(self._tasks)

    @property
    def running(self) -> int:
        return len(self._tasks)

    def submit(self, task: Task[Any]) -> None:
        assert self.idle > 0
        self._tasks.append(task)

    def wait(self) -> tuple[Task[Any], Any]:
        task = self._tasks.pop(self._chance.randrange(len(self._tasks)))
        return task, task()
