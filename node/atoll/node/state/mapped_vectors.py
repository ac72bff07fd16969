"""Vectors in files that nobody else sees: for state that must be kept but not in memory that a limit counts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch import Tensor

from atoll.core.errors import DataDirUnusable
from atoll.node.system.shared_vectors import FP32_BYTES, map_vector


def mapped_vector(folder: Path, elements: int) -> Tensor:
    """fp32 zeros [elements] on the disk of `folder`, in a file without a name: gone when nobody refers to them.

    Raises `DataDirUnusable` when there is no room: space is reserved, so that writing later cannot fail.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, FP32_BYTES * elements))
            return map_vector(file.fileno(), elements)
    except OSError as error:
        raise DataDirUnusable(f"no room for {FP32_BYTES * elements} bytes in {folder}: {error}") from error
