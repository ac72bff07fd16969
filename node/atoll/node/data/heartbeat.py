"""Progress calls for work that reports none, such as a library call that downloads a data set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HEARTBEAT_SECONDS = 2.0


@contextmanager
def heartbeat(beat: Callable[[], object], seconds: float = HEARTBEAT_SECONDS) -> Iterator[None]:
    """Call `beat` in a thread, every few seconds during the block. `beat` must be safe to call from threads."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(seconds):
            beat()

    thread = threading.Thread(target=work, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def repeated(tell: Callable[[int], object], seconds: float = HEARTBEAT_SECONDS) -> Iterator[Callable[[int], None]]:
    """Yield a function that calls `tell`, and repeat its last call every few seconds.

    Until its first call, `tell` gets 0.
    """
    last = 0

    def remember(progress: int) -> None:
        nonlocal last
        last = progress
        tell(progress)

    with heartbeat(lambda: tell(last), seconds):
        yield remember
