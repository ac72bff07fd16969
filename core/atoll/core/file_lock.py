"""Lock on a file, held until its process ends. The file contains a text that names the holder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLocked(Exception):
    """Another process holds the lock. The text of this error is the holder's own description."""


def lock_file(path: Path, holder: str) -> int:
    """Lock `path` for this process and write `holder` into it. Closing the returned descriptor unlocks it.

    Raises `FileLocked` while another process holds the lock, `OSError` if the file cannot be used.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, 0)
        os.write(descriptor, holder.encode())
    except BlockingIOError:
        other = os.read(descriptor, 1000).decode(errors="replace").strip()
        os.close(descriptor)
        raise FileLocked(other) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
