"""The few things that durable writes ask of a file system, so that tests can cut the power between any two of them.

What is written survives a power cut only after `sync`, a new name only after `sync_directory` of what it stands in.
Every method raises `OSError`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

Bytes = bytes | memoryview


class File(Protocol):
    """A file that is being written."""

    def write(self, data: Bytes) -> None:
        """Append all of it."""

    def sync(self) -> None:
        """Make what was written durable."""

    def close(self) -> None:
        """Done; durable only if synced."""


class Disk(Protocol):
    """Names and files. Paths are absolute or relative to the working directory, as everywhere."""

    def create(self, path: Path, mode: int = 0o644) -> File:
        """An empty file under that name, replacing what was there."""

    def rename(self, old: Path, new: Path) -> None:
        """Atomic; replaces a file, and refuses to replace a directory that is not empty."""

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        """A new directory."""

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in it durable."""


class _OsFile:
    def __init__(self, path: Path, mode: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)

    def write(self, data: Bytes) -> None:
        left = memoryview(data).cast("B")
        while left:  # one call writes at most 2 GiB
            left = left[os.write(self._descriptor, left) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class OsDisk:
    """The real one."""

    def create(self, path: Path, mode: int = 0o644) -> File:
        return _OsFile(path, mode)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        path.mkdir(mode)

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


OS_DISK = OsDisk()
