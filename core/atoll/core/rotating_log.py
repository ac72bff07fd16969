"""A log file of bounded size: the newest lines in one file, older lines in a second one. Writing never raises.

The full file is copied and then truncated, not moved. So other writers continue in the same file: child processes, and
native code that writes to standard error while it crashes.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

MOST_BYTES = 8 << 20  # of each of the two files
_STDERR = 2


class RotatingLog:
    """Appends text to `path`. A full file is copied to `path.1` and truncated.

    Text that cannot be written is dropped.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most = path, most_bytes
        self._lock = threading.RLock()  # a destructor that runs inside `write_bytes` may log too
        self._descriptor = -1
        self._has_stderr = False

    def write(self, text: str) -> int:
        """Append text."""
        self.write_bytes(text.encode(errors="replace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Append bytes."""
        with self._lock:
            try:
                descriptor = self._usable()
                written = os.fstat(descriptor).st_size
                if written and written + len(data) > self._most:
                    self._empty(descriptor)
                os.write(descriptor, data[: self._most])
            except (OSError, ValueError):
                return

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def take_stderr(self) -> None:
        """Redirect standard error of this process and its children to this file from now on."""
        with self._lock:
            sys.stderr.flush()
            self._has_stderr = True
            os.dup2(self._usable(), _STDERR)

    def _usable(self) -> int:
        """The open file's descriptor. Opens the file again if it was removed."""
        if self._descriptor >= 0 and os.fstat(self._descriptor).st_nlink == 0:
            self.close()
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if self._has_stderr:
                os.dup2(self._descriptor, _STDERR)
        return self._descriptor

    def _empty(self, descriptor: int) -> None:
        """Copy the full file to the older one, if there is space, and truncate it."""
        older = self._path.with_name(f"{self._path.name}.1")
        copy = self._path.with_name(f"{self._path.name}.new")
        try:
            shutil.copyfile(self._path, copy)
            copy.chmod(0o600)
            copy.replace(older)
        except OSError:
            copy.unlink(missing_ok=True)
        os.ftruncate(descriptor, 0)
