"""The beginning of a safetensors file, which says what is where. Believed as far as it parses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from atoll.core.errors import CheckpointCorrupt

MALFORMED_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What reading an entry raises that is not as the format has it."""


def read_header(file: BinaryIO, path: Path, max_header_bytes: int) -> tuple[Mapping[str, Any], int]:
    """Entries by tensor, and the offset at which data begins. Raises `CheckpointCorrupt`, `OSError`."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, max_header_bytes):
        raise CheckpointCorrupt(f"{path} is no safetensors file")
    try:
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        return dict(entries), 8 + length
    except MALFORMED_ERRORS as error:
        raise CheckpointCorrupt(f"{path} is no safetensors file: its header does not parse") from error
