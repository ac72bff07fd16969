"""File system operations of durable writes, as an interface so that tests can simulate a power cut between any two.

Written bytes survive a power cut only after `sync`. A new name survives it only after `sync_directory` of its
directory. Every method raises `OSError`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

Bytes = bytes | memoryview


class File(Protocol):
    """A file that is open for writing."""

    def write(self, data: Bytes) -> None:
        """Append all of `data`."""

    def sync(self) -> None:
        """Make the written bytes durable."""

    def close(self) -> None:
        """Close the file. Its bytes are durable only after `sync`."""


class Disk(Protocol):
    """File names and files. Relative paths are relative to the working directory."""

    def create(self, path: Path, mode: int = 0o644) -> File:
        """Create an empty file, replacing an existing one."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically. Replaces a file; fails for a directory that is not empty."""

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        """Create a directory."""

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""


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
    """The operating system's file system."""

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
