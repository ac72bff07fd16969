"""Genesis by a node that cannot hold the model: its initial parameters as a file, one at a time in memory."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.core.errors import DataDirUnusable
from atoll.node.training.model import initial_parameters
from atoll.node.training.shape import ModelShape


def write_initial(shape: ModelShape, seed: int, path: Path) -> None:
    """All elements in layer order, fp32 little-endian: the bits of `Initialise`. On the disk when it returns.

    Raises `DataDirUnusable`.
    """
    try:
        with path.open("wb") as file:
            for _, values in initial_parameters(shape, seed):
                file.write(values.numpy().astype("<f4", copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataDirUnusable(
            f"cannot write the initial parameters to {path}: {error.strerror}", "make room on this disk"
        ) from error
