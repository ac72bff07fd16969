"""Spill files: the tokens of one unit of input, between reading and shuffling.

A file has the tokens of all documents back to back, the length of each document (in tokens, 8 bytes), what was read
(JSON) and last the size of that JSON (8 bytes). All numbers are little-endian. A spill file stays on the machine that
wrote it and is deleted when its documents are in shards.
"""

from __future__ import annotations

import errno
import json
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.disk import OS_DISK, Disk, File
from atoll.node.data.durable_files import new_file
from atoll.node.data.source_report import SourceReport

_BUFFER_BYTES = 1 << 20
_NUMBER = np.dtype("<u8")


@dataclass(frozen=True)
class Spill:
    """A spill file: its path, its size, and a report of the input."""

    path: Path
    tokens: int
    documents: int
    report: SourceReport


class _Writer:
    """Collects tokens and writes them in large parts."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self._length = 0  # of the document that has not ended
        self.lengths = array("Q")
        self.tokens = 0

    def add(self, tokens: NDArray[Any], ends_document: bool) -> None:
        """Append tokens. Raises `OSError`."""
        self._length += len(tokens)
        self.tokens += len(tokens)
        self._parts.append(tokens.tobytes())
        self._part_bytes += len(self._parts[-1])
        if self._part_bytes >= _BUFFER_BYTES:
            self.flush()
        if ends_document and self._length:
            self.lengths.append(self._length)
            self._length = 0

    def flush(self) -> None:
        """Write the collected tokens. Raises `OSError`."""
        self._file.write(b"".join(self._parts))
        self._parts.clear()
        self._part_bytes = 0


def write_spill(
    path: Path, parts: Iterable[tuple[NDArray[Any], bool]], report: SourceReport, disk: Disk = OS_DISK
) -> Spill:
    """Write the tokens of `parts`, each with a flag that is True if it ends its document.

    A document without tokens is left out. `report` is complete when `parts` ends. Raises `DataDirUnusable`, and the
    errors of `parts`.
    """
    with new_file(path, disk) as file:
        writer = _Writer(file)
        for tokens, ends in parts:
            writer.add(tokens, ends)
        writer.flush()
        file.write(np.asarray(writer.lengths, dtype=_NUMBER).tobytes())
        counts = {"tokens": writer.tokens, "documents": len(writer.lengths), "report": report.to_dict()}
        read = json.dumps(counts).encode()
        file.write(read + len(read).to_bytes(8, "little"))
    return Spill(path, writer.tokens, len(writer.lengths), report)


def open_spill(path: Path) -> Spill:
    """Read the counts and the report of a finished spill file. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(8), "little")
        file.seek(-8 - size, os.SEEK_END)
        read = json.loads(file.read(size))
    return Spill(path, read["tokens"], read["documents"], SourceReport.from_dict(read["report"]))


def document_lengths(spill: Spill, dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """Return the length of each document in tokens. Raises `OSError`."""
    with spill.path.open("rb") as file:
        file.seek(spill.tokens * dtype.itemsize)
        data = file.read(spill.documents * _NUMBER.itemsize)
    lengths = np.frombuffer(data[: len(data) // 8 * 8], dtype=_NUMBER).astype(np.int64)
    if len(lengths) != spill.documents or int(lengths.sum()) != spill.tokens:
        raise OSError(errno.EIO, "it is cut short or damaged", str(spill.path))
    return lengths
