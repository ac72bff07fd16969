"""Reader of a safetensors file's header, which lists its tensors. Only the syntax is checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from atoll.core.errors import CheckpointCorrupt

MALFORMED_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Exceptions that reading a malformed entry can raise."""


def read_header(file: BinaryIO, path: Path, max_header_bytes: int) -> tuple[Mapping[str, Any], int]:
    """Return the entries by tensor name and the offset of the data. Raises `CheckpointCorrupt`, `OSError`."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, max_header_bytes):
        raise CheckpointCorrupt(f"{path} is not a safetensors file: header of {length} bytes in a file of {size}")
    try:
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        return dict(entries), 8 + length
    except MALFORMED_ERRORS as error:
        raise CheckpointCorrupt(f"{path} is not a safetensors file: its header does not parse") from error
