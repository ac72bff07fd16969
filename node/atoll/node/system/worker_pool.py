"""A pool of worker processes on all cores, which are killed when this process ends, even by SIGKILL.

A task is a picklable callable without arguments. Workers are new interpreters, so that they inherit neither threads nor
memory, and they do not import the main program. Each leads its own process group: Ctrl-C reaches only this process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Generic, TypeVar

from atoll.core.errors import ChildDied
from atoll.node.system.child_processes import KILL_TIMEOUT, command_killed_with_parent
from atoll.node.system.worker_process import Failure

Result = TypeVar("Result")
Task = Callable[[], Result]

_THREAD_COUNTS = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def threads_environment(threads: int = 1) -> Mapping[str, str]:
    """Return the environment variables that limit libraries to `threads` threads.

    The tokenizers library encodes in threads of its own, and each has a heap of its own: it allocates for every word,
    which takes a sixth longer in the heap that Python has fragmented.
    """
    return {
        "TOKENIZERS_PARALLELISM": "true",
        "MALLOC_ARENA_MAX": str(1 + threads),
        **dict.fromkeys(_THREAD_COUNTS, str(threads)),
    }


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class WorkerPool(Generic[Result]):
    """Worker processes that each run one task at a time. Use it as a context manager; the end kills them."""

    def __init__(self, workers: int, remedy: str = "", threads: int = 1) -> None:
        """`remedy`: advice to the user if a worker dies. `threads`: of each worker."""
        self._remedy = remedy
        self._environment = {**os.environ, **threads_environment(threads)}
        self._children: dict[Connection, subprocess.Popen[bytes]] = {}
        self._running: dict[Connection, Task[Result]] = {}
        self._idle: list[Connection] = []
        self._workers = max(1, workers)

    def __enter__(self) -> WorkerPool[Result]:
        try:
            for _ in range(self._workers):
                self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    @property
    def idle(self) -> int:
        """Number of workers that wait for a task."""
        return len(self._idle)

    @property
    def running(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._running)

    def submit(self, task: Task[Result]) -> None:
        """Give a task to an idle worker, of which there must be one. Raises `ChildDied`."""
        connection = self._idle.pop()
        self._running[connection] = task
        try:
            connection.send(task)
        except OSError as error:
            raise self._died(connection) from error

    def wait(self) -> tuple[Task[Result], Result]:
        """Wait until a task ends; return it and its result. Raises the task's error, `ChildDied`."""
        connection = next(item for item in wait(list(self._running)) if isinstance(item, Connection))
        try:
            answer = connection.recv()
        except (EOFError, OSError) as error:
            raise self._died(connection) from error
        task = self._running.pop(connection)
        self._idle.append(connection)
        if not isinstance(answer, Failure):
            return task, answer
        if answer.error is not None:
            raise answer.error
        raise RuntimeError(f"a worker process failed:\n{answer.traceback}")

    def run(self, tasks: Iterable[Task[Result]]) -> Iterator[tuple[Task[Result], Result]]:
        """Yield each task with its result, in the order in which tasks end."""
        for task in tasks:
            if not self.idle:
                yield self.wait()
            self.submit(task)
        while self.running:
            yield self.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with closing(theirs):
            command = [sys.executable, "-P", "-m", "atoll.node.system.worker_process", str(theirs.fileno())]
            child = subprocess.Popen(
                command_killed_with_parent(command, os.getpid()),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        connection = Connection(ours.detach())
        self._children[connection] = child
        self._idle.append(connection)

    def _died(self, connection: Connection) -> ChildDied:
        child = self._children[connection]
        try:
            status = child.wait(KILL_TIMEOUT.total_seconds())
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait(KILL_TIMEOUT.total_seconds())
        why = f"signal {-status}" if status < 0 else f"exit status {status}"
        return ChildDied(f"a worker process ended ({why}); the system may lack memory", self._remedy)

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()
        for connection, child in self._children.items():
            child.wait(KILL_TIMEOUT.total_seconds())
            connection.close()
        self._children.clear()


# arguments: the number of workers, and advice to the user if one dies
StartPool = Callable[[int, str], WorkerPool[Any]]
