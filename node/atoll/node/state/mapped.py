"""Vectors in files that nobody else sees: for state that must be kept but not in memory that a limit counts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.errors import DataDirUnusable


def mapped_vector(folder: Path, elements: int) -> Tensor:
    """fp32 zeros [elements] on the disk of `folder`, which are gone when nobody refers to them.

    Raises `DataDirUnusable` when there is no room: space is reserved, so that writing later cannot fail.
    """
    if not elements:
        return torch.zeros(0)
    try:
        descriptor, name = tempfile.mkstemp(prefix=".mapped-", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, 4 * elements)
            return torch.from_file(name, shared=True, size=elements, dtype=torch.float32)
        finally:
            os.close(descriptor)
            Path(name).unlink()
    except (OSError, RuntimeError) as error:  # torch raises the latter
        raise DataDirUnusable(f"no room for {4 * elements} bytes in {folder}: {error}") from error
