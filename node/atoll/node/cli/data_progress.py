"""Progress of long data commands on stderr: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.core.units import bytes_text, duration_text

_SECONDS_BETWEEN_LINES = 10.0
_LEAST_SECONDS = 1.0  # seconds before a rate is shown

ShowProgress = Callable[[int, int, str], None]  # arguments: bytes done, bytes in all, further text


class Rate:
    """Bytes per second since the first call, and the remaining time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start: tuple[float, int] | None = None

    def text(self, done: int, everything: int) -> str:
        """Return "12.3 MB/s, 5 min 03 s left"; empty while it is not known."""
        now = self._clock()
        if self._start is None:
            self._start = now, done
        seconds, count = now - self._start[0], done - self._start[1]
        if seconds < _LEAST_SECONDS or count <= 0:
            return ""
        left = (everything - done) * seconds / count
        return f"{count / seconds / 1e6:.1f} MB/s" + (f", {duration_text(left)} left" if done < everything else "")


@contextmanager
def progress_on_stderr(what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[ShowProgress]:
    """Yield a function that shows the progress of `what` ("tokenising")."""
    rate = Rate(clock)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn(what), BarColumn(), TextColumn("{task.fields[told]}", markup=False))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None, told="")

            def draw(done: int, everything: int, told: str) -> None:
                bar.update(task, completed=done, total=everything or None, told=_line(rate, done, everything, told))

            yield draw
        return
    last = [float("-inf")]

    def print_line(done: int, everything: int, told: str) -> None:
        line = _line(rate, done, everything, told)
        if clock() - last[0] >= _SECONDS_BETWEEN_LINES or done == everything:
            last[0] = clock()
            print(f"{what}: {line}", file=sys.stderr, flush=True)

    yield print_line


def _line(rate: Rate, done: int, everything: int, told: str) -> str:
    return ", ".join(
        part for part in (f"{bytes_text(done)} of {bytes_text(everything)}", told, rate.text(done, everything)) if part
    )
