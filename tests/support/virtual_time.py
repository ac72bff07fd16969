"""An event loop whose clock jumps to the next timer when nobody has anything to do: minutes of waiting cost nothing.

Nothing outside the loop may be waited for: no other process, and no thread. What is given to the loop's own threads, as
by `asyncio.to_thread`, is done at once; other executors have to be `Inline`. Both ends of a local socket may be within
the loop.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopClock:
    """The running loop's time."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    unix = monotonic


class _Selector(selectors.DefaultSelector):
    """Never sleeps: what would have been slept is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everybody waits for something that never happens"
            self.now += max(0.0, timeout)
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _Selector) -> None:
        self._virtual = selector
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return super().run_in_executor(executor or Inline(), func, *args)


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, without the waiting. `loop.time()` tells the virtual seconds, from 0."""
    with asyncio.Runner(loop_factory=lambda: _Loop(_Selector())) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorate a test to run so: deadlines of milliseconds then pass only where nobody has anything to do."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtually(test(*args, **kwargs))

    return run


class Inline(Executor):
    """Runs what is submitted at once, in the thread of the caller."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
