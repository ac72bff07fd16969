"""File format of backups: an uncompressed tar whose first entry is an index with the size and SHA-256 of each file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

from atoll.core.disk import OS_DISK
from atoll.core.errors import BackupCorrupt, ConfigError
from atoll.core.files import data_dir_unusable

VERSION = 1
INDEX = "backup.json"
MAX_INDEX_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20


def pack(archive: Path, sources: Mapping[str, Path], unix_ms: int) -> None:
    """Write these files, by name, to a new file of mode 0600, durably. Raises `DataDirUnusable`."""
    try:
        contents = {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in sources.items()}
        index = json.dumps({"version": VERSION, "created_unix_ms": unix_ms, "files": contents}, indent=2).encode()
        descriptor = os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                _add(tar, INDEX, io.BytesIO(index), len(index), unix_ms)
                for name, path in sources.items():
                    with path.open("rb") as source:
                        _add(tar, name, source, path.stat().st_size, unix_ms)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise data_dir_unusable(archive, error) from error


def unpack(archive: Path, directory: Path, required: Collection[str], possible: Collection[str]) -> int:
    """Extract and verify all files into `directory`, mode 0600; returns the backup's time (Unix milliseconds).

    Names that are neither `required` nor `possible` are refused. Raises `BackupCorrupt`, `ConfigError` if the archive
    cannot be read, `DataDirUnusable`.
    """
    try:
        tar = tarfile.open(archive, "r:")  # noqa: SIM115 - closed below; its errors differ
    except OSError as error:
        raise ConfigError(f"cannot read {archive}: {error.strerror or error}") from error
    except tarfile.TarError as error:
        raise _not_a_backup(archive, error) from error
    try:
        with tar:
            return _unpack(tar, archive, directory, set(required), {*required, *possible})
    except (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_a_backup(archive, error) from error
    except OSError as error:
        raise data_dir_unusable(directory, error) from error


def _unpack(tar: tarfile.TarFile, archive: Path, directory: Path, required: set[str], allowed: set[str]) -> int:
    entries = iter(tar)
    created, expected = _index(tar, next(entries, None))
    if not required <= expected.keys() <= allowed:
        raise ValueError("its index does not list the files of a coordinator")
    for entry in entries:
        known = expected.pop(entry.name, None)
        source = tar.extractfile(entry) if known is not None and entry.isreg() else None
        if known is None or source is None or entry.size != known["bytes"]:
            raise BackupCorrupt(f"{entry.name!r} in {archive} is not as its index lists it")
        path = directory / entry.name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if _copy(source, path) != known["sha256"]:
            raise BackupCorrupt(f"{entry.name} in {archive} does not have the SHA-256 of its index")
    if expected:
        raise BackupCorrupt(f"{archive} lacks {', '.join(sorted(expected))}")
    return created


def _index(tar: tarfile.TarFile, entry: tarfile.TarInfo | None) -> tuple[int, dict[str, Any]]:
    source = tar.extractfile(entry) if entry is not None and entry.name == INDEX else None
    if source is None or entry is None or entry.size > MAX_INDEX_BYTES:
        raise ValueError(f"its first entry is not {INDEX}")
    index = json.loads(source.read())
    if index["version"] != VERSION:
        raise BackupCorrupt(
            f"the backup has version {index['version']!r}", "use the release that made it, or a newer one"
        )
    return int(index["created_unix_ms"]), dict(index["files"])


def _add(tar: tarfile.TarFile, name: str, source: IO[bytes], size: int, unix_ms: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o600, unix_ms // 1000
    tar.addfile(entry, source)


def _copy(source: IO[bytes], path: Path) -> str:
    """Write a durable file; returns its SHA-256 in hex."""
    digest = hashlib.sha256()
    file = OS_DISK.create(path, 0o600)
    try:
        while piece := source.read(_PIECE_BYTES):
            digest.update(piece)
            file.write(piece)
        file.sync()
    finally:
        file.close()
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _not_a_backup(archive: Path, error: Exception) -> BackupCorrupt:
    return BackupCorrupt(f"{archive} is not a backup: {error}", "`atoll-coordinator backup` writes one")
