"""Tokens on disk, so that a restarted node need not read and tokenise its text again.

An entry is a file of tokens and a JSON file that describes it; its name is the hash of everything that the tokens
depend on (`corpus.py`). The JSON file is written last. One process at a time builds (an exclusive lock on `lock`);
others wait and map the result. A map holds a shared lock on its file of tokens for as long as it exists, so that nobody
deletes an entry in use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.core import log
from atoll.core.disk import OS_DISK, Bytes
from atoll.core.file_lock import FileLocked, lock_file
from atoll.core.files import data_dir_unusable, make_private_dir, write_atomic
from atoll.node.data.source_report import SourceReport
from atoll.node.data.tokenise import OnProgress

ENTRIES = 4
_WAIT_SECONDS = 0.5

_log = log.get("data")


class Build(Protocol):
    """Produces the tokens of a corpus."""

    def __call__(self, write: Callable[[Bytes], object], folder: Path) -> SourceReport:
        """Write all tokens, in order; `folder` is an empty one for temporary files."""
        ...


class CachedTokens:
    """The tokens of an entry, with their report and checksum."""

    def __init__(self, tokens: NDArray[Any], report: SourceReport, checksum: int) -> None:
        self.tokens, self.report, self.checksum = tokens, report, checksum


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    tokens: int
    crc32: int  # of all bytes
    report: dict[str, int | str]


class TokenCache:
    """The entries of one folder. All methods raise `DataDirUnusable` if the folder cannot be used."""

    def __init__(self, folder: Path, entries: int = ENTRIES) -> None:
        self._folder, self._entries = make_private_dir(folder), entries

    @property
    def folder(self) -> Path:
        """Where the entries are."""
        return self._folder

    def open_or_build(self, key: str, dtype: np.dtype[Any], build: Build, on_progress: OnProgress) -> CachedTokens:
        """Map the entry `key`; build it first if it does not exist. Raises the errors of `build`."""
        if (found := self._open(key, dtype)) is not None:
            return found
        lock = self._lock(on_progress)
        try:
            if (found := self._open(key, dtype)) is None:
                self._build(key, dtype, build)
                found = self._open(key, dtype)
            self._delete_old(key)
        except OSError as error:
            raise data_dir_unusable(self._folder, error) from error
        finally:
            os.close(lock)
        if found is None:
            raise data_dir_unusable(self._folder, OSError("a file that was just written is not there"))
        return found

    def forget(self, key: str) -> None:
        """Delete an entry that is wrong, also while it is mapped."""
        with suppress(FileNotFoundError):
            self._description(key).unlink()
        with suppress(FileNotFoundError):
            self._tokens(key).unlink()

    def _description(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _tokens(self, key: str) -> Path:
        return self._folder / f"{key}.tokens"

    def _open(self, key: str, dtype: np.dtype[Any]) -> CachedTokens | None:
        """Map a complete entry. The caller verifies the checksum when it first reads all bytes."""
        try:
            entry = _Entry.model_validate_json(self._description(key).read_bytes())
            report = SourceReport.from_dict(entry.report)
            with self._tokens(key).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the map's copy of the descriptor keeps the lock
                size = os.fstat(file.fileno()).st_size
                if entry.dtype != dtype.str or size != entry.tokens * dtype.itemsize:
                    return None
                tokens = np.memmap(file, dtype=dtype, mode="r") if size else np.empty(0, dtype)
            os.utime(self._description(key))  # counts as used now: the newest entries are kept
        except (FileNotFoundError, BlockingIOError):
            return None
        except (OSError, ValidationError, ValueError) as error:
            _log.warning("cached_tokens_unreadable", path=str(self._tokens(key)), reason=str(error).splitlines()[0])
            return None
        return CachedTokens(tokens, report, entry.crc32)

    def _lock(self, on_progress: OnProgress) -> int:
        while True:
            try:
                return lock_file(self._folder / "lock", f"process {os.getpid()}")
            except FileLocked:  # another process of this node reads the same text
                on_progress(0)
                time.sleep(_WAIT_SECONDS)
            except OSError as error:
                raise data_dir_unusable(self._folder, error) from error

    def _build(self, key: str, dtype: np.dtype[Any], build: Build) -> None:
        self.forget(key)
        parts, new = self._folder / "parts", self._folder / "new.tokens"
        shutil.rmtree(parts, ignore_errors=True)  # left by a process that was killed
        parts.mkdir(mode=0o700)
        crc32 = size = 0

        file = OS_DISK.create(new, 0o600)

        def write(data: Bytes) -> None:
            nonlocal crc32, size
            file.write(data)
            crc32 = zlib.crc32(data, crc32)
            size += memoryview(data).nbytes

        try:
            report = build(write, parts)
            file.sync()
            OS_DISK.rename(new, self._tokens(key))
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            file.close()
            shutil.rmtree(parts, ignore_errors=True)
        entry = _Entry(dtype=dtype.str, tokens=size // dtype.itemsize, crc32=crc32, report=report.to_dict())
        write_atomic(self._description(key), entry.model_dump_json().encode(), mode=0o600)

    def _delete_old(self, key: str) -> None:
        """Delete all but the newest entries, except those in use, and tokens without a description."""
        newest = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        kept = {key, *(path.stem for path in newest[: self._entries])}
        for path in self._folder.glob("*.tokens"):
            if path.stem in kept:
                continue
            with path.open("rb") as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.forget(path.stem)
