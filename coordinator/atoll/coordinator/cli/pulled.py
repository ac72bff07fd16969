"""A checkpoint that arrives message by message, written so that it is there whole and true, or not at all.

Files go under a temporary name beside the target. Sizes and SHA-256 must be those announced, every layer's digest the
manifest's, and the manifest must carry votes, all of them genuine; then all is synced and renamed. Whether the votes
are enough is the coordinator's to know, which knows who decides: it passes nothing on else (`state/checkpoints.py`).
Needs neither torch nor safetensors.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from atoll.core.disk import OS_DISK
from atoll.core.errors import AlreadyExists, CheckpointCorrupt
from atoll.core.files import unusable, write_synced
from atoll.core.manifest import Head, read_head
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

MANIFEST = "manifest"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_HEADER_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_FP32_BYTES = 4


def receive(
    messages: Iterator[mb.CheckpointUpload],
    target: Path,
    run_id: str,
    layers: Sequence[str],
    progress: Callable[[int, int], None],
) -> Head:
    """Write what `messages` bring to the directory `target`; `progress` is told bytes so far and in all.

    `layers` are the names in the layer table. Raises `AlreadyExists`, `CheckpointCorrupt`, `DataDirUnusable`, and
    what reading the messages raises; nothing is left behind then.
    """
    refuse_existing(target)
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True, mode=0o755)
        try:
            head = _fill(temporary, messages, run_id, layers, progress)
            OS_DISK.sync_directory(temporary)
            OS_DISK.rename(temporary, target)
            OS_DISK.sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise unusable(target, error) from error
    return head


def refuse_existing(target: Path) -> None:
    """Raise `AlreadyExists` unless `target` is free, or an empty directory; `DataDirUnusable` if that is unknown."""
    try:
        taken = any(target.iterdir()) if target.is_dir() else target.exists() or target.is_symlink()
    except OSError as error:
        raise unusable(target, error) from error
    if taken:
        raise AlreadyExists(f"{target} exists already", "name a new directory with --to")


def _fill(
    directory: Path,
    messages: Iterator[mb.CheckpointUpload],
    run_id: str,
    layers: Sequence[str],
    progress: Callable[[int, int], None],
) -> Head:
    opening = next(messages, mb.CheckpointUpload()).opening
    files = {item.name: item for item in opening.files}
    if not files or len(files) != len(opening.files) or not all(_NAME.fullmatch(name) for name in files):
        raise CheckpointCorrupt("the node sent no files, or some with names that cannot be")
    head = read_head(opening.manifest, run_id)
    if not head.signers:
        raise CheckpointCorrupt(f"nobody voted for the manifest of round {head.round} that the node sent")
    if head.round != opening.round:
        raise CheckpointCorrupt(f"the node sent the manifest of round {head.round} for round {opening.round}")
    stream = _Bytes(messages, sum(item.bytes for item in files.values()), progress)
    for item in files.values():
        digest = hashlib.sha256()
        write_synced(directory / item.name, stream.take(item.bytes, digest.update))
        if digest.digest() != item.sha256:
            raise CheckpointCorrupt(f"{item.name} does not have the SHA-256 that the node announced")
    _place_manifest(directory, opening.manifest, sent=MANIFEST in files)
    for kind in ("anchor", "momentum"):
        digests = [getattr(state, f"{kind}_digest") for state in head.manifest.layers]
        if len(digests) != len(layers):
            raise CheckpointCorrupt(f"the manifest has {len(digests)} layers, the run {len(layers)}")
        check_layers(directory / f"{kind}.safetensors", dict(zip(layers, digests, strict=True)))
    return head


def check_layers(path: Path, digests: Mapping[str, bytes]) -> None:
    """Raise `CheckpointCorrupt` unless a safetensors file holds exactly these fp32 layers with these SHA-256."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointCorrupt(f"{path.name} is no safetensors file")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            if header.keys() != digests.keys():
                raise CheckpointCorrupt(f"{path.name} does not hold the run's layers")
            for name, digest in digests.items():
                if _digest(file, 8 + length, header[name]) != digest:
                    raise CheckpointCorrupt(f"layer {name} in {path.name} is not what the manifest says")
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"the node sent no {path.name}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path.name} has a header that does not parse") from error


def _digest(file: BinaryIO, data: int, entry: Mapping[str, Any]) -> bytes:
    """SHA-256 of one tensor's bytes; `data` is where tensors begin. Raises `ValueError` and its like."""
    start, end = entry["data_offsets"]
    (elements,) = entry["shape"]
    if entry["dtype"] != "F32" or end - start != _FP32_BYTES * elements or not 0 <= start <= end:
        raise ValueError("not one flat fp32 tensor")
    file.seek(data + start)
    found, left = hashlib.sha256(), end - start
    while left:
        piece = file.read(min(left, _PIECE_BYTES))
        if not piece:
            raise ValueError("the file ends before its tensors do")
        found.update(piece)
        left -= len(piece)
    return found.digest()


def _place_manifest(directory: Path, manifest: manifest_pb2.CommittedManifest, *, sent: bool) -> None:
    path = directory / MANIFEST
    if not sent:
        write_synced(path, manifest.SerializeToString(deterministic=True))
    elif manifest_pb2.CommittedManifest.FromString(path.read_bytes()).payload != manifest.payload:
        raise CheckpointCorrupt("the node sent two manifests that differ")


class _Bytes:
    """The bytes of all files, cut anew at the ends of files."""

    def __init__(
        self, messages: Iterator[mb.CheckpointUpload], total: int, progress: Callable[[int, int], None]
    ) -> None:
        self._messages = messages
        self._total = total
        self._progress = progress
        self._done = 0
        self._rest = memoryview(b"")

    def take(self, count: int, also: Callable[[memoryview], object]) -> Iterator[memoryview]:
        """The next `count` bytes in pieces, each shown to `also`. Raises `CheckpointCorrupt` when there are fewer."""
        while count:
            if not self._rest:
                message = next(self._messages, None)
                if message is None or not message.data:
                    raise CheckpointCorrupt("the checkpoint ended before all of it had come", "try again")
                self._rest = memoryview(message.data)
            piece, self._rest = self._rest[:count], self._rest[count:]
            count -= len(piece)
            self._done += len(piece)
            also(piece)
            yield piece
            self._progress(self._done, self._total)
