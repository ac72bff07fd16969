"""Reader of safetensors files, one tensor at a time.

The format's own library maps the whole file privately for torch. Where process memory is limited, the mapping counts
towards the limit. This reader needs memory for one tensor only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from atoll.core.errors import CheckpointCorrupt
from atoll.core.safetensors_header import MALFORMED_ERRORS, read_header

_MAX_HEADER_BYTES = 100 << 20  # limit of the format's library
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def tensor_names(path: Path) -> list[str]:
    """List the names of all tensors in a file. Raises `CheckpointCorrupt`."""
    try:
        with path.open("rb") as file:
            entries, _ = read_header(file, path, _MAX_HEADER_BYTES)
            return list(entries)
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror}") from error


def read_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor into memory of its own. Raises `CheckpointCorrupt`."""
    try:
        with path.open("rb") as file:
            entries, data_offset = read_header(file, path, _MAX_HEADER_BYTES)
            if name not in entries:
                raise CheckpointCorrupt(f"{path} has no tensor {name}")
            return _read(file, path, name, entries[name], data_offset)
    except OSError as error:
        raise CheckpointCorrupt(f"{path}: {name} cannot be read: {error.strerror}") from error


def _read(file: BinaryIO, path: Path, name: str, entry: Any, data_offset: int) -> Tensor:
    try:
        dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not isinstance(shape, list) or not all(type(number) is int for number in (*shape, start, end)):
            raise ValueError("shape and data_offsets must contain integers only")
        count = end - start
        fits = 0 <= start <= end <= os.fstat(file.fileno()).st_size - data_offset
        if not fits or min(shape, default=0) < 0 or count != dtype.itemsize * torch.Size(shape).numel():
            raise ValueError("data_offsets do not match dtype and shape, or lie outside the file")
    except MALFORMED_ERRORS as error:
        raise CheckpointCorrupt(f"{path}: {name} cannot be read: {error}") from error
    bytes_B = torch.empty(count, dtype=torch.uint8)
    file.seek(data_offset + start)
    target = bytes_B.numpy().data
    while target:
        got = file.readinto(target)  # type: ignore[attr-defined]  # every real file has it
        if not got:
            raise CheckpointCorrupt(f"{path} ends inside the tensor {name}")
        target = target[got:]
    return bytes_B.view(dtype).view(shape)
