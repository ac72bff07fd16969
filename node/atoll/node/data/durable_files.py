"""Files of a corpus that appear whole or not at all: written under another name, made durable, renamed.

The name of an unfinished file begins with a dot and ends in `.tmp`. `remove_unfinished` deletes what a killed build
left. A full disk raises `DataDirUnusable`; only the file that was being written is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.core.disk import OS_DISK, Disk, File
from atoll.core.errors import DataDirUnusable

GO_ON = "run the same command again: it goes on where it stopped"


@contextmanager
def new_file(path: Path, disk: Disk = OS_DISK) -> Iterator[File]:
    """Write `path` so that it is complete or does not exist, also after a power cut. Raises `DataDirUnusable`."""
    temporary = path.with_name(f".{path.name}.tmp")
    with explained(path):
        file = disk.create(temporary)
        try:
            try:
                yield file
                file.sync()
            finally:
                file.close()
            disk.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                disk.unlink(temporary)
            raise
        disk.sync_directory(path.parent)


def write_file(path: Path, data: bytes, disk: Disk = OS_DISK) -> None:
    """Write a small file whole. Raises `DataDirUnusable`."""
    with new_file(path, disk) as file:
        file.write(data)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Convert a file system error to the error that the user sees. Raises `DataDirUnusable`."""
    try:
        yield
    except OSError as error:
        raise DataDirUnusable(
            f"cannot write {path}: {error.strerror or error}",
            f"check the owner, permissions and free space of that directory, then {GO_ON}",
        ) from error


def remove_unfinished(directory: Path) -> None:
    """Delete the unfinished files in a directory. Raises `DataDirUnusable`."""
    with explained(directory):
        for path in directory.glob(".*.tmp"):
            path.unlink()
