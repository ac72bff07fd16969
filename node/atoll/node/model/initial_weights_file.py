"""Initial parameters written to a file, for genesis on a node that cannot hold the model.

At most one layer is in memory at a time.
"""

from __future__ import annotations

import os
from pathlib import Path

from atoll.core.errors import DataDirUnusable
from atoll.node.model.run_model import RunModel
from atoll.node.model.span import Span


def write_initial_weights(run: RunModel, path: Path) -> None:
    """Write all elements in layer order, fp32 little-endian: the bits that the order `Initialise` produces.

    The file is synced to disk on return. Raises `DataDirUnusable`.
    """
    try:
        with path.open("wb") as file:
            for _, values in run.initial_parameters(Span(0, run.architecture.layers - 1)):
                file.write(values.contiguous().numpy().astype("<f4", copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataDirUnusable(
            f"cannot write the initial parameters to {path}: {error.strerror}", "free some space on this disk"
        ) from error
