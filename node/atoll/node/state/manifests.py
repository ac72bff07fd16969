"""The manifest chain on disk: one file a round, written before anything acts on it."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError

from atoll.core.errors import AtollError, CheckpointCorrupt
from atoll.core.files import make_private_dir, write_atomic
from atoll.core.manifest import Head, read_head
from atoll.v1 import manifest_pb2

_SUFFIX = ".manifest"


class ManifestStore:
    """The manifests that this node has seen committed, newest last."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory = make_private_dir(directory)
        self._run_id = run_id

    def append(self, head: Head) -> None:
        """Make `head` durable. Raises `DataDirUnusable`."""
        write_atomic(self._path(head.round), head.committed.SerializeToString())

    def get(self, number: int) -> manifest_pb2.CommittedManifest | None:
        """The manifest of that round, or None when this node does not have it."""
        path = self._path(number)
        return self._read(path).committed if path.exists() else None

    def newest(self) -> Head | None:
        """The highest round on disk. Raises `CheckpointCorrupt`."""
        paths = sorted(self._directory.glob(f"*{_SUFFIX}"))
        return self._read(paths[-1]) if paths else None

    def _read(self, path: Path) -> Head:
        try:
            committed = manifest_pb2.CommittedManifest.FromString(path.read_bytes())
            return read_head(committed, self._run_id)
        except (DecodeError, AtollError, OSError) as error:
            raise CheckpointCorrupt(
                f"{path} cannot be read: {error}", "move it away; it will be fetched again"
            ) from error

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:09d}{_SUFFIX}"
