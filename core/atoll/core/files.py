"""Files that must survive a power cut, and files that only their owner may read."""

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
    """Create `path` (and parents) with mode 0700, durably, or close a directory of ours that was open to others.

    Raises `DataDirUnusable`, also for a directory that everybody shares (`/tmp` itself).
    """
    try:
        missing = list(itertools.takewhile(lambda parent: not parent.exists(), (path, *path.parents)))
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.stat()
        if found.st_mode & stat.S_ISVTX:
            raise DataDirUnusable(f"{path} is shared by all users", "name a directory of its own with --data-dir")
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(0o700)
        for created in reversed(missing):
            OS_DISK.sync_directory(created.parent)
    except OSError as error:
        raise data_dir_unusable(path, error) from error
    return path


def open_anonymous_file(name: str) -> int:
    """A descriptor of an empty, nameless file: in memory where the system can, in the temporary folder elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_atomic(path: Path, chunks: bytes | Iterable[Bytes], mode: int = 0o644, disk: Disk = OS_DISK) -> None:
    """Replace `path` so that a reader or a power cut sees the old bytes or the new ones, never a mix.

    Temporary name in the same directory, fsync, rename, fsync of the directory. Raises `DataDirUnusable`.
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


def write_synced(path: Path, chunks: bytes | Iterable[Bytes], mode: int = 0o644, disk: Disk = OS_DISK) -> None:
    """A file whose bytes are durable; its name is not, yet. Raises `OSError`."""
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
    """The bytes of a file of ours. Raises `DataDirUnusable` when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise data_dir_unusable(path, error) from error


def data_dir_unusable(path: Path, error: OSError) -> DataDirUnusable:
    """What an error of the file system means for the owner."""
    return DataDirUnusable(
        f"cannot use {path}: {error.strerror or error}",
        "check the owner, the permissions and the free space of that directory, or name another with --data-dir",
    )


def raise_descriptor_limit(most: int) -> int:
    """As many file descriptors as this process may have, up to `most`; how many those are. A thousand is usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox, or a system that has less than it says
        return soft
    return wanted
