"""What torch leaves behind, for commands that import it in their own process."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_torch_cache() -> Iterator[None]:
    """torch would make a folder in the system's temporary directory, and leave it there."""
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        yield
