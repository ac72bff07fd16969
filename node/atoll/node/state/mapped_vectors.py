"""Vectors in unnamed files, for state that must not count towards the node's memory limit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch import Tensor

from atoll.core.errors import DataDirUnusable
from atoll.node.system.shared_vectors import FP32_BYTES, map_vector


def mapped_vector(folder: Path, elements: int) -> Tensor:
    """Create fp32 zeros [elements] in an unnamed file in `folder`; the space is freed with the last reference.

    Reserves the disk space, so that later writes cannot fail. Raises `DataDirUnusable` when there is too little.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, FP32_BYTES * elements))
            return map_vector(file.fileno(), elements)
    except OSError as error:
        raise DataDirUnusable(f"cannot reserve {FP32_BYTES * elements} bytes in {folder}: {error}") from error
