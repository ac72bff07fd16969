"""The files of a checkpoint's directory, and their sums. Without torch, because a seed also uploads checkpoints."""

from __future__ import annotations

import os
import re
from pathlib import Path

from atoll.core.errors import CheckpointCorrupt

ANCHOR, MOMENTUM = "anchor.safetensors", "momentum.safetensors"
MANIFEST, SPEC, SUMS = "manifest", "run.toml", "SHA256SUMS"
SUMMED = (ANCHOR, MOMENTUM, MANIFEST, SPEC)

_MAX_SMALL_FILE_BYTES = 64 << 20


def read_sums(directory: Path) -> dict[str, str]:
    """Read `SHA256SUMS`: hex SHA-256 by file name. Raises `CheckpointCorrupt` and `OSError`."""
    text = read_small_file(directory / SUMS)
    lines = [line.partition(b"  ") for line in text.removesuffix(b"\n").split(b"\n")]
    try:
        sums = {name.decode("ascii"): digest.decode("ascii") for digest, _, name in lines}
    except UnicodeDecodeError as error:
        raise CheckpointCorrupt(f"{directory / SUMS} differs from the file that Atoll writes") from error
    canonical = "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()
    if canonical != text or tuple(sums) != SUMMED or not all(re.fullmatch("[0-9a-f]{64}", sums[key]) for key in sums):
        raise CheckpointCorrupt(f"{directory / SUMS} differs from the file that Atoll writes")
    return sums


def read_small_file(path: Path) -> bytes:
    """Read a file that is not a vector. Raises `CheckpointCorrupt` if it is too large, and `OSError`."""
    with path.open("rb") as file:
        # `read` allocates as many bytes as it may return
        most = min(_MAX_SMALL_FILE_BYTES, os.fstat(file.fileno()).st_size)
        data = file.read(most + 1)
    if len(data) > _MAX_SMALL_FILE_BYTES:
        raise CheckpointCorrupt(f"{path} is too large: more than {_MAX_SMALL_FILE_BYTES} bytes")
    return data
