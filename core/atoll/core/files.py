"""Durable file writes, private files and directories, and the limit of open files."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from atoll.core.disk import OS_DISK, Bytes, Disk
from atoll.core.errors import DataDirUnusable


def make_private_dir(path: Path) -> Path:
    """Create `path` (and parents) durably with mode 0700, or restrict an existing directory of this user to 0700.

    Raises `DataDirUnusable`, also for a directory that all users share, such as `/tmp`.
    """
    try:
        missing = list(itertools.takewhile(lambda parent: not parent.exists(), (path, *path.parents)))
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.stat()
        if found.st_mode & stat.S_ISVTX:
            raise DataDirUnusable(
                f"{path} is shared by all users", "pass a directory that only this program uses with --data-dir"
            )
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(0o700)
        for created in reversed(missing):
            OS_DISK.sync_directory(created.parent)
    except OSError as error:
        raise data_dir_unusable(path, error) from error
    return path


def open_anonymous_file(name: str) -> int:
    """Return a descriptor of an empty file without a name: in memory if possible, else in the temporary folder."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_atomic(path: Path, chunks: bytes | Iterable[Bytes], mode: int = 0o644, disk: Disk = OS_DISK) -> None:
    """Replace `path` so that readers see either the old or the new bytes, also after a power cut.

    Writes a temporary file in the same directory, fsyncs it, renames it and fsyncs the directory. Raises
    `DataDirUnusable`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            write_synced(temporary, chunks, mode, disk)
            disk.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.unlink(temporary)
            raise
        disk.sync_directory(path.parent)
    except OSError as error:
        raise data_dir_unusable(path, error) from error


def remove_unfinished(directory: Path, prefix: str) -> None:
    """Remove unfinished files of `write_atomic` with this prefix that killed processes left. They may contain secrets.

    The caller must hold the directory's lock.
    """
    for path in directory.glob(f".{prefix}*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def write_synced(path: Path, chunks: bytes | Iterable[Bytes], mode: int = 0o644, disk: Disk = OS_DISK) -> None:
    """Write a file and make its bytes durable, but not its name. Raises `OSError`."""
    file = disk.create(path, mode)
    try:
        for chunk in (chunks,) if isinstance(chunks, bytes) else chunks:
            file.write(chunk)
        file.sync()
    finally:
        file.close()


def write_private(path: Path, data: bytes) -> None:
    """`write_atomic` with mode 0600."""
    write_atomic(path, data, mode=0o600)


def read_private(path: Path) -> bytes:
    """Read a file of the data directory. Raises `DataDirUnusable` if that fails."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise data_dir_unusable(path, error) from error


def data_dir_unusable(path: Path, error: OSError) -> DataDirUnusable:
    """Convert a file system error to the error that the owner sees."""
    return DataDirUnusable(
        f"cannot use {path}: {error.strerror or error}",
        "check the owner, permissions and free space of that directory, or pass another with --data-dir",
    )


def raise_descriptor_limit(most: int) -> int:
    """Raise this process's limit of open files to at most `most` and return the new limit. The usual one is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox, or a system that allows less than its hard limit
        return soft
    return wanted
