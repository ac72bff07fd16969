"""A worker process of `WorkerPool`: runs the tasks that come through a socket until the socket closes.

Tasks and results are pickled. Both ends are this program: no other program can write to the socket.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from atoll.core.errors import AtollError


@dataclass(frozen=True)
class Failure:
    """Why a task has no result: an error for the user, or the traceback of an unexpected one."""

    error: AtollError | None
    traceback: str = ""


def main(descriptor: int) -> None:
    """Run tasks until the other end of the socket closes."""
    with Connection(descriptor) as connection:
        while True:
            try:
                task = connection.recv()
            except (EOFError, ConnectionError):
                return
            result = _run(task)
            try:
                connection.send(result)
            except ConnectionError:
                return


def _run(task: Callable[[], Any]) -> Any:
    try:
        return task()
    except AtollError as error:
        return Failure(error)
    except Exception:
        return Failure(None, traceback.format_exc())


if __name__ == "__main__":
    # imported under its real name, so that pickled classes are the same as the pool's
    from atoll.node.system import worker_process

    worker_process.main(int(sys.argv[1]))
