"""The manifest chain on disk: one file a round, written before anything acts on it.

A file is the SHA-256 of the rest, then the manifest: a serialised message that was cut may still parse, with fewer
votes. One that is damaged counts as not held, so it costs a question to others and never the node.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

from google.protobuf.message import DecodeError

from atoll.core import log
from atoll.core.disk import OS_DISK, Disk
from atoll.core.errors import AtollError, CheckpointCorrupt, DataDirUnusable
from atoll.core.files import data_dir_unusable, make_private_dir, write_atomic
from atoll.core.manifest import Head, parse_and_verify_head
from atoll.v1 import manifest_pb2

_NAME = re.compile(r"(\d{9,})\.manifest")
_LEFTOVER = re.compile(r"\.\d{9,}\.manifest\.\d+\.tmp")
_SUM_BYTES = hashlib.sha256().digest_size

_log = log.get("manifests")


class ManifestStore:
    """The manifests that this node has seen committed, newest last."""

    def __init__(self, directory: Path, run_id: str, disk: Disk = OS_DISK) -> None:
        self._directory = make_private_dir(directory)
        self._run_id = run_id
        self._disk = disk

    def sweep(self) -> None:
        """Remove what a cut left half written. Only for the one daemon that writes here."""
        for path in self._entries(_LEFTOVER):
            with contextlib.suppress(OSError):
                self._disk.unlink(path)

    def append(self, head: Head) -> None:
        """Make `head` durable. Raises `DataDirUnusable`."""
        data = head.committed.SerializeToString(deterministic=True)
        write_atomic(self._path(head.round), hashlib.sha256(data).digest() + data, disk=self._disk)

    def try_append(self, head: Head) -> None:
        """`append`, unless the disk refuses: training goes on, and after a restart the others are asked."""
        try:
            self.append(head)
        except DataDirUnusable as error:
            _log.error("a manifest is not on disk", round=head.round, reason=str(error))

    def get(self, number: int) -> manifest_pb2.CommittedManifest | None:
        """The manifest of that round, or None when this node does not have it whole. Raises `DataDirUnusable`."""
        head = self._read_valid(self._path(number))
        return head.committed if head is not None else None

    def newest(self) -> Head | None:
        """That of the highest round of which this node has it whole. Raises `DataDirUnusable`."""
        for path in sorted(self._entries(_NAME), key=_round_of, reverse=True):
            head = self._read_valid(path)
            if head is not None:
                return head
        return None

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
            _log.warning("a manifest on disk is damaged; it counts as not held", path=str(path), reason=str(error))
            return None

    def _parse(self, path: Path, data: bytes) -> Head:
        stored, payload = data[:_SUM_BYTES], data[_SUM_BYTES:]
        if hashlib.sha256(payload).digest() != stored:
            raise CheckpointCorrupt(f"{path} does not match its sum")
        head = parse_and_verify_head(manifest_pb2.CommittedManifest.FromString(payload), self._run_id)
        if head.round != _round_of(path):
            raise CheckpointCorrupt(f"{path} holds round {head.round}")
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
