"""Genesis by a node that cannot hold the model: its initial parameters as a file, a layer at most in memory."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.core.errors import DataDirUnusable
from atoll.node.model.run_model import RunModel
from atoll.node.model.span import Span


def write_initial_weights(run: RunModel, path: Path) -> None:
    """All elements in layer order, fp32 little-endian: the bits of `Initialise`. On the disk when it returns.

    Raises `DataDirUnusable`.
    """
    try:
        with path.open("wb") as file:
            for _, values in run.initial_parameters(Span(0, run.architecture.layers - 1)):
                file.write(values.contiguous().numpy().astype("<f4", copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataDirUnusable(
            f"cannot write the initial parameters to {path}: {error.strerror}", "make room on this disk"
        ) from error
