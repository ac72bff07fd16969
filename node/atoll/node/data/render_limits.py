"""Limits on time and memory of untrusted code that this process runs in a sandbox: chat templates.

Both limits are those of the operating system, so they also hold inside one long operation that allocates. Time is the
processor time of this process, so a busy machine makes no difference. Use it in the main thread only.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_AGAIN_SECONDS = 0.05  # before the signal is repeated, in case an error handler swallowed the first exception


class TimeExceeded(BaseException):
    """The code took too long. It is a `BaseException`, so that no `except Exception` of a library catches it."""


@contextmanager
def render_limits(seconds: float, memory_bytes: int) -> Iterator[None]:
    """Raise `TimeExceeded` after `seconds` of processor time, and `MemoryError` after `memory_bytes` more memory."""
    armed = True

    def exceeded(_number: int, _frame: FrameType | None) -> None:
        if armed:
            raise TimeExceeded

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    ends = [limit for limit in (soft, hard, _used_bytes() + memory_bytes) if limit != resource.RLIM_INFINITY]
    earlier = signal.signal(signal.SIGPROF, exceeded)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(ends), hard))
        signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, earlier)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _used_bytes() -> int:
    """Return the size of this process's address space, or 64 TiB where the system does not report it."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 1 << 46
