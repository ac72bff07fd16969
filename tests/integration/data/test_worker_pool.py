"""Worker processes run tasks, report errors, and end with the process that started them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from functools import partial
from operator import add
from pathlib import Path

import pytest

from atoll.core.errors import ChildDied, CorpusError
from atoll.node.system.worker_pool import WorkerPool, threads_environment, usable_cores

PARENT = """
import sys, time
from functools import partial
from atoll.node.system.worker_pool import WorkerPool
with WorkerPool(2) as pool:
    for _ in range(2):
        pool.submit(partial(exec, "import os, time; os.write(1, b'.'); time.sleep(600)"))
    pool.wait()
"""


def test_every_task_gives_its_result() -> None:
    with WorkerPool[int](2) as pool:
        tasks = [partial(add, number, 1) for number in range(9)]
        assert sorted(result for _, result in pool.run(tasks)) == list(range(1, 10))
        assert (pool.idle, pool.running) == (2, 0)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_worker_uses_so_many_threads_and_is_another_process(threads: int) -> None:
    variables = threads_environment(threads)
    assert str(threads) in variables.values()
    with WorkerPool(1, threads=threads) as pool:
        found = [result for _, result in pool.run([partial(os.getenv, name) for name in variables])]
        assert found == list(variables.values())
        assert {result for _, result in pool.run([os.getpid] * 3)}.isdisjoint({os.getpid()})
    assert usable_cores() >= 1


def test_errors_of_tasks_arrive() -> None:
    with WorkerPool(1) as pool:
        pool.submit(partial(exec, "from atoll.core.errors import CorpusError; raise CorpusError('wrong', 'repair it')"))
        with pytest.raises(CorpusError, match="wrong") as refused:
            pool.wait()
        assert refused.value.remedy == "repair it"
        pool.submit(partial(exec, "1 / 0"))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            pool.wait()
        pool.submit(partial(add, 1, 1))
        assert pool.wait()[1] == 2, "the worker lives on"


def test_a_worker_that_is_killed_is_an_error_with_the_remedy() -> None:
    with WorkerPool(1, "run it again") as pool:
        pool.submit(partial(exec, "import os; os.kill(os.getpid(), 9)"))
        with pytest.raises(ChildDied, match="signal 9") as died:
            pool.wait()
    assert died.value.remedy == "run it again"


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        seen = b""
        while len(seen) < 2:
            seen += os.read(parent.stdout.fileno(), 2)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        ready, _, _ = select.select([parent.stdout], [], [], 60)
        assert ready, "a worker still holds the pipe"
        assert os.read(parent.stdout.fileno(), 1) == b"", "every worker has ended"
