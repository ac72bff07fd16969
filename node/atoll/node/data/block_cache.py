"""A cache of fetched blocks on disk, with a budget. It may lose data at any time; all reads are verified.

A chunk of a shard has one file: the digests of its blocks, and from `DATA_OFFSET` on its bytes, with holes where
nothing was fetched. Readers check the hash of every block that they read (`data/block_reader.py`): a hole, a torn write
and a changed byte look alike, as a block that must be fetched. So files are not synced, several processes may write
one, and a node that was killed uses the blocks that are on disk. The least recently used files are deleted first.
Held-out text is *pinned*: an evaluation must not wait for mirrors.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.core import log
from atoll.node.data.card import ShardName

BLOCKS_FOLDER = "blocks"  # in the folder of a corpus
DATA_OFFSET = 4096  # of a chunk's bytes in its file; the digests of the chunk's blocks come before them
_LOCK_SECONDS = 5.0
# of the budget; after writing so many bytes, a process checks the size of all files, also of other processes
_LOOK_SHARE = 0.05
_POLL_SECONDS = 0.02
_KEPT_SHARE = 0.9  # of the budget, after old files were deleted
_PINNED_SHARE = 0.25  # of the budget, at most


def chunk_file(shard: ShardName, chunk: int) -> str:
    """Return the name of the file with the blocks of a chunk and their digests."""
    return f"{shard.source}-{shard.number:06d}-{chunk:06d}.chunk"


def shard_file(shard: ShardName) -> str:
    """Return the name of the file with the digests of a shard's chunks."""
    return f"{shard.source}-{shard.number:06d}.shard"


class BlockCache:
    """Files of chunks in one directory. Errors of the disk are logged once, and mean that nothing is cached."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self._directory, self.budget_bytes = directory, budget_bytes
        self._lock = threading.Lock()
        self._written = float("inf")  # bytes since this process last measured the cache; the first write measures it
        self._complained = False
        self._pinned = frozenset[str]()

    def pin(self, files: Mapping[str, int]) -> bool:
        """Never delete these files from now on, unless they can take more than a quarter of the budget. `files`: sizes.

        Returns whether they are pinned.
        """
        most = sum(files.values())
        if most > self.budget_bytes * _PINNED_SHARE:
            log.get("corpus").warning(
                "held_out_text_not_pinned",
                bytes=most,
                budget=self.budget_bytes,
                remedy="an evaluation may fetch it again: set disk_gigabytes higher",
            )
            return False
        self._pinned = frozenset(files)
        return True

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes of a file that the cache has; empty if the file is absent."""
        try:
            descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            data = os.pread(descriptor, stop - start, start)
            os.utime(descriptor)
            return data
        except OSError as error:
            self._complain(error)
            return b""
        finally:
            os.close(descriptor)

    def holds(self, name: str) -> bool:
        """Whether a file exists and is not empty; if so, it counts as used now."""
        try:
            os.utime(self._directory / name)
            return (self._directory / name).stat().st_size > 0
        except OSError:
            return False

    def write(self, name: str, start: int, data: bytes | memoryview) -> None:
        """Write bytes of a file, and delete old files if all files together exceed the budget."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, data, start)
            finally:
                os.close(descriptor)
            with self._lock:
                self._written += len(data)
                if self._written > self.budget_bytes * _LOOK_SHARE:
                    self._evict()
                    self._written = 0.0
        except OSError as error:
            self._complain(error)

    @contextmanager
    def only_process(self, name: str) -> Iterator[None]:
        """Keep other processes of this node from fetching the same file, unless the lock takes over 5 seconds."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._complain(error)
            yield
            return
        try:
            _lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _evict(self) -> None:
        found = list[tuple[float, int, Path]]()
        for entry in os.scandir(self._directory):
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                found.append((facts.st_mtime, facts.st_blocks * 512, Path(entry.path)))
        total = sum(size for _, size, _ in found)
        if total <= self.budget_bytes * (1 - _LOOK_SHARE):
            return
        for _, size, path in sorted(found):
            if total <= self.budget_bytes * _KEPT_SHARE:
                break
            if path.name in self._pinned:
                continue
            with suppress(OSError):
                path.unlink()
                total -= size

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            log.get("corpus").warning("cache_unusable", directory=str(self._directory), error=error.strerror)


def _lock(descriptor: int) -> None:
    gives_up_at = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < gives_up_at:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_POLL_SECONDS)
