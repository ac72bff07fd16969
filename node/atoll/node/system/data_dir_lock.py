"""Lock of a node's data directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from atoll.core.errors import AlreadyRunning, DataDirUnusable


@contextlib.contextmanager
def data_dir_lock(data_dir: Path) -> Iterator[None]:
    """Lock the data directory against other daemons. Raises `AlreadyRunning`, `DataDirUnusable`."""
    try:
        descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DataDirUnusable(f"cannot write in {data_dir}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise AlreadyRunning(
            f"another atoll daemon uses {data_dir}",
            f"stop it with `atoll leave --data-dir {data_dir}`, or choose another --data-dir",
        ) from error
    else:
        yield
    finally:
        os.close(descriptor)
