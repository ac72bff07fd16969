"""An event loop whose clock jumps to the next timer when nobody has anything to do: minutes of waiting cost nothing.

Nothing outside the loop may be waited for (no sockets, no threads): executors have to be `Inline`.
"""

from __future__ import annotations

import asyncio
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


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, without the waiting. `loop.time()` tells the virtual seconds, from 0."""
    with asyncio.Runner(loop_factory=lambda: _Loop(_Selector())) as runner:
        return runner.run(work)


class Inline(Executor):
    """Runs what is submitted at once, in the thread of the caller."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
