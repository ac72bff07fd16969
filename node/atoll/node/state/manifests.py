"""The manifest chain on disk: one file per round, written before the node acts on the round.

The newest `KEPT_MANIFESTS` stay. A returning node follows at most 2,048 rounds one by one (`heads.py`), and other nodes
may commit as many more meanwhile. The manifests of checkpoints on disk stay too, each with the previous manifest, which
names its electorate. After a power cut of the whole swarm, other nodes need both to check the checkpoint's head.

A file has the SHA-256 of the manifest, then the manifest: a truncated protobuf message may still parse, with fewer
votes. A damaged file counts as missing: the node asks other members for that manifest and keeps running.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from google.protobuf.message import DecodeError

from atoll.core import log
from atoll.core.disk import OS_DISK, Disk
from atoll.core.errors import AtollError, CheckpointCorrupt, DataDirUnusable
from atoll.core.files import data_dir_unusable, make_private_dir, write_atomic
from atoll.core.manifest import Head, parse_and_verify_head
from atoll.v1 import manifest_pb2

KEPT_MANIFESTS = 4096  # 80 MB with 64 members
_MOST_REMOVED = 16  # old manifests removed for every new one, so that no write waits for many removals

_NAME = re.compile(r"(\d{9,})\.manifest")
_LEFTOVER = re.compile(r"\.\d{9,}\.manifest\.\d+\.tmp")
_SUM_BYTES = hashlib.sha256().digest_size

_log = log.get("manifests")


class ManifestStore:
    """The committed manifests that this node has seen."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        disk: Disk = OS_DISK,
        checkpointed: Callable[[], Collection[int]] = lambda: (),
    ) -> None:
        """`checkpointed` returns the rounds of the checkpoints on disk."""
        self._directory = make_private_dir(directory)
        self._run_id = run_id
        self._disk = disk
        self._checkpointed = checkpointed
        self._numbers: list[int] | None = None  # a heap of the rounds on disk; None: not listed yet
        self._spared: set[int] = set()  # old rounds that checkpoints still needed
        self._removing = threading.Lock()

    def sweep(self) -> None:
        """Remove half-written files. Only the one daemon that writes here may call this."""
        for path in self._entries(_LEFTOVER):
            with contextlib.suppress(OSError):
                self._disk.unlink(path)

    def append(self, head: Head) -> None:
        """Write `head` durably, and remove some of the rounds that are too old. Raises `DataDirUnusable`."""
        data = head.committed.SerializeToString(deterministic=True)
        write_atomic(self._path(head.round), hashlib.sha256(data).digest() + data, disk=self._disk)
        with self._removing:
            self._remove_older_than(head.round - KEPT_MANIFESTS, head.round)

    def try_append(self, head: Head) -> None:
        """Call `append` and log its error.

        Training continues; after a restart the node asks other members for the manifest.
        """
        try:
            self.append(head)
        except DataDirUnusable as error:
            _log.error("manifest not written", round=head.round, reason=str(error))

    def get(self, number: int) -> manifest_pb2.CommittedManifest | None:
        """Read the manifest of that round; None when it is missing or damaged. Raises `DataDirUnusable`."""
        head = self._read_valid(self._path(number))
        return head.committed if head is not None else None

    def consecutive(self, first: int, count: int, most_bytes: int) -> list[manifest_pb2.CommittedManifest]:
        """Read the manifests of at most `count` rounds from `first`, up to the first missing one.

        They have at most `most_bytes` together, unless the first one alone has more. Raises `DataDirUnusable`.
        """
        found: list[manifest_pb2.CommittedManifest] = []
        size = 0
        for number in range(first, first + count):
            committed = self.get(number)
            size += committed.ByteSize() if committed is not None else 0
            if committed is None or (found and size > most_bytes):
                break
            found.append(committed)
        return found

    def newest(self) -> Head | None:
        """Read the undamaged manifest of the highest round. Raises `DataDirUnusable`."""
        for path in sorted(self._entries(_NAME), key=_round_of, reverse=True):
            head = self._read_valid(path)
            if head is not None:
                return head
        return None

    def _remove_older_than(self, oldest: int, written: int) -> None:
        """Remove a few rounds up to `oldest`.

        Files that reappear after a power cut are removed after the next start.
        """
        if self._numbers is None:
            self._numbers = sorted(_round_of(path) for path in self._entries(_NAME))
        else:
            heapq.heappush(self._numbers, written)
        needed = {number - before for number in self._checkpointed() for before in (0, 1)}
        removable = list(self._spared - needed)
        while len(removable) < _MOST_REMOVED and self._numbers and self._numbers[0] <= oldest:
            number = heapq.heappop(self._numbers)
            if number in needed:
                self._spared.add(number)
            else:
                removable.append(number)
        self._spared &= needed
        for number in removable:
            try:
                self._disk.unlink(self._path(number))
            except FileNotFoundError:
                continue
            except OSError as error:
                _log.warning("old manifest not removed", round=number, reason=str(error))

    def _read_valid(self, path: Path) -> Head | None:
        try:
            data = path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return None
        except OSError as error:
            raise data_dir_unusable(path, error) from error
        try:
            return self._parse(path, data)
        except (DecodeError, AtollError) as error:
            _log.warning("damaged manifest ignored", path=str(path), reason=str(error))
            return None

    def _parse(self, path: Path, data: bytes) -> Head:
        stored, payload = data[:_SUM_BYTES], data[_SUM_BYTES:]
        if hashlib.sha256(payload).digest() != stored:
            raise CheckpointCorrupt(f"{path} does not match its SHA-256")
        head = parse_and_verify_head(manifest_pb2.CommittedManifest.FromString(payload), self._run_id)
        if head.round != _round_of(path):
            raise CheckpointCorrupt(f"{path} contains round {head.round}")
        return head

    def _entries(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            return [path for path in self._directory.iterdir() if pattern.fullmatch(path.name)]
        except OSError as error:
            raise data_dir_unusable(self._directory, error) from error

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:09d}.manifest"


def _round_of(path: Path) -> int:
    return int(path.name.partition(".")[0])
