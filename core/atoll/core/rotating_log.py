"""A log file with a bound: the newest lines in one file, those before in a second one. Writing never raises."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from pathlib import Path

MOST_BYTES = 8 << 20  # of each of the two files
_DRAIN_SECONDS = 2.0
_PIECE_BYTES = 1 << 16


class RotatingLog:
    """Appends text to `path`; moves it to `path.1` when it is full. A line that cannot be written is dropped."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most = path, most_bytes
        self._lock = threading.Lock()
        self._descriptor = -1

    def write(self, text: str) -> int:
        """Append text."""
        self.write_bytes(text.encode(errors="replace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Append bytes."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._descriptor < 0:
                self._descriptor = self._open()
            written = os.fstat(self._descriptor).st_size
            if written and written + len(data) > self._most:
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
                os.close(self._descriptor)
                self._descriptor = -1
                self._descriptor = self._open()
            os.write(self._descriptor, data[: self._most])

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def take_stderr(self) -> None:
        """Write to this log what this process and its children print on standard error from now on."""
        reading, writing = os.pipe()
        sys.stderr.flush()
        os.dup2(writing, 2)
        os.close(writing)
        thread = threading.Thread(target=self._copy, args=(reading,), name="stderr", daemon=True)
        thread.start()
        atexit.register(self._give_stderr_up, thread)

    def _give_stderr_up(self, copying: threading.Thread) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        copying.join(_DRAIN_SECONDS)  # a child may hold the pipe

    def _copy(self, reading: int) -> None:
        while data := os.read(reading, _PIECE_BYTES):
            self.write_bytes(data)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
