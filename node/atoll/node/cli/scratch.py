"""Temporary cache of torch, for commands that import torch in their own process."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_torch_cache() -> Iterator[None]:
    """Give torch a cache directory that is deleted at the end; by default it leaves one in the temporary directory."""
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        yield
