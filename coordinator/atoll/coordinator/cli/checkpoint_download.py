"""Download of a checkpoint: written completely and verified, or not at all.

Files arrive message by message and go under a temporary name beside the target. Sizes and SHA-256 must equal the
announced ones. Every layer's digest must equal the manifest's, and the manifest must carry valid votes. Then all is
synced and renamed. Whether the votes are a quorum is checked by the coordinator, which knows the electorate and
relays nothing else (`runs/checkpoints.py`).

Where each node holds only some layers, their checkpoints arrive at the same time and become a directory of
directories: one round, all layers. Needs neither torch nor safetensors.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from atoll.core.disk import OS_DISK
from atoll.core.errors import AlreadyExists, CheckpointCorrupt
from atoll.core.files import data_dir_unusable, write_synced
from atoll.core.manifest import Head, parse_and_verify_head
from atoll.core.safetensors_header import MALFORMED_ERRORS, read_header
from atoll.core.units import layers_text
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

MANIFEST = "manifest"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_HEADER_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_FP32_BYTES = 4


@dataclass(frozen=True)
class DownloadedCheckpoint:
    """A complete, verified checkpoint on this disk."""

    head: Head
    parts: tuple[str, ...]  # directories in the target; empty if the target itself is one checkpoint of all layers


def receive(
    messages: Iterator[mb.CheckpointUpload],
    target: Path,
    run_id: str,
    layers: Sequence[str],
    progress: Callable[[int, int], None],
) -> DownloadedCheckpoint:
    """Write the files in `messages` to the directory `target`.

    `layers` are the names in the layer table. `progress` is called with bytes received and bytes in all. Raises
    `AlreadyExists`, `CheckpointCorrupt`, `DataDirUnusable`, and what reading `messages` raises. A failure leaves
    nothing behind.
    """
    refuse_existing(target)
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True, mode=0o755)
        try:
            pulled = _write_messages(temporary, messages, run_id, layers, progress)
            OS_DISK.sync_directory(temporary)
            OS_DISK.rename(temporary, target)
            OS_DISK.sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise data_dir_unusable(target, error) from error
    return pulled


def refuse_existing(target: Path) -> None:
    """Raise `AlreadyExists` unless `target` is free or an empty directory; `DataDirUnusable` if it cannot be read."""
    try:
        taken = any(target.iterdir()) if target.is_dir() else target.exists() or target.is_symlink()
    except OSError as error:
        raise data_dir_unusable(target, error) from error
    if taken:
        raise AlreadyExists(f"{target} exists already", "name a new directory with --to")


def _write_messages(
    directory: Path,
    messages: Iterator[mb.CheckpointUpload],
    run_id: str,
    layers: Sequence[str],
    progress: Callable[[int, int], None],
) -> DownloadedCheckpoint:
    first = next(messages, mb.CheckpointUpload())
    count = max(1, first.opening.parts)
    if count > len(layers):
        raise CheckpointCorrupt(f"the coordinator announced {count} checkpoints for a model of {len(layers)} layers")
    arriving: dict[int, _CheckpointWriter] = {}
    with ExitStack() as writers:
        message: mb.CheckpointUpload | None = first
        while message is not None:
            if message.HasField("opening"):
                if message.part in arriving or message.part >= count:
                    raise CheckpointCorrupt(f"checkpoint {message.part} of {count} arrived twice or is out of range")
                place = directory if count == 1 else directory / str(message.part)
                arriving[message.part] = writers.enter_context(
                    closing(_CheckpointWriter(place, message.opening, run_id))
                )
            elif message.part not in arriving or not message.data:
                raise CheckpointCorrupt("the transfer ended before the checkpoint was complete", "try again")
            else:
                arriving[message.part].take(message.data)
                announced = sum(each.bytes_total for each in arriving.values())
                progress(sum(each.bytes_received for each in arriving.values()), announced * count // len(arriving))
            complete = len(arriving) == count and all(each.complete for each in arriving.values())
            message = None if complete else next(messages, None)
    if len(arriving) < count or not all(each.complete for each in arriving.values()):
        raise CheckpointCorrupt("the transfer ended before the checkpoint was complete", "try again")
    return _verify_and_name(directory, list(arriving.values()), layers)


def _verify_and_name(
    directory: Path, arrived: Sequence[_CheckpointWriter], layers: Sequence[str]
) -> DownloadedCheckpoint:
    """Check the received checkpoints against their manifest; name each directory by its layers."""
    head, names, known = arrived[0].head, list[str](), set[int]()
    for each in arrived:
        if each.head.hash != head.hash:
            raise CheckpointCorrupt(
                f"the nodes sent checkpoints of different states: rounds {head.round} and {each.head.round}",
                "try again",
            )
        layer_range = each.check(layers)
        known.update(layer_range)
        if len(arrived) > 1:
            names.append(f"layers-{layer_range.start}-{layer_range.stop - 1}")
            OS_DISK.sync_directory(each.directory)
            OS_DISK.rename(each.directory, directory / names[-1])
    if missing := set(range(len(layers))) - known:
        raise CheckpointCorrupt(f"the received checkpoints lack {layers_text(missing)}")
    return DownloadedCheckpoint(head, tuple(sorted(names, key=lambda name: int(name.split("-")[1]))))


class _CheckpointWriter:
    """Writes one checkpoint while its bytes arrive."""

    def __init__(self, directory: Path, opening: mb.CheckpointOpening, run_id: str) -> None:
        """Raises `CheckpointCorrupt`, `OSError`."""
        files = {item.name: item for item in opening.files}
        if not files or len(files) != len(opening.files):
            raise CheckpointCorrupt("the node sent no files, or two of one name")
        if bad := [name for name in files if not _NAME.fullmatch(name)]:
            raise CheckpointCorrupt(f"the node sent a file name that is not allowed: {bad[0][:64]!r}")
        self.head = parse_and_verify_head(opening.manifest, run_id)
        if not self.head.signers:
            raise CheckpointCorrupt(f"the manifest of round {self.head.round} that the node sent carries no votes")
        if self.head.round != opening.round:
            raise CheckpointCorrupt(f"the node sent the manifest of round {self.head.round} for round {opening.round}")
        self.directory = directory
        self.bytes_total, self.bytes_received = sum(item.bytes for item in files.values()), 0
        self._manifest, self._manifest_sent = opening.manifest, MANIFEST in files
        directory.mkdir(exist_ok=True)
        self._file_writer = _write(directory, list(files.values()))
        self.complete = False
        self._feed_writer(None)

    def take(self, data: bytes) -> None:
        """Write the next bytes of its files. Raises `CheckpointCorrupt`, `OSError`."""
        self.bytes_received += len(data)
        if self.complete or self.bytes_received > self.bytes_total:
            raise CheckpointCorrupt("the node sent more than it announced")
        self._feed_writer(data)

    def close(self) -> None:
        """Close the open file; nothing more is written."""
        self._file_writer.close()

    def check(self, layers: Sequence[str]) -> range:
        """Verify all layers against the manifest; return the layers held. Raises `CheckpointCorrupt`, `OSError`."""
        _place_manifest(self.directory, self._manifest, sent=self._manifest_sent)
        states = self.head.manifest.layers
        if len(states) != len(layers):
            raise CheckpointCorrupt(f"the manifest has {len(states)} layers, the run {len(layers)}")
        held = held_layers(self.directory / "anchor.safetensors", layers)
        for kind in ("anchor", "momentum"):
            digests = {layers[number]: getattr(states[number], f"{kind}_digest") for number in held}
            check_layers(self.directory / f"{kind}.safetensors", digests)
        return held

    def _feed_writer(self, data: bytes | None) -> None:
        try:
            self._file_writer.send(data)
        except StopIteration:
            self.complete = True


def _write(directory: Path, files: Sequence[mb.CheckpointFile]) -> Generator[None, bytes | None, None]:
    """Coroutine that is sent the bytes of all files and splits them at file ends. Raises `CheckpointCorrupt`,
    `OSError`.
    """
    rest = memoryview(b"")
    for item in files:
        digest, left = hashlib.sha256(), item.bytes
        file = OS_DISK.create(directory / item.name)
        try:
            while left:
                if not rest:
                    rest = memoryview((yield) or b"")
                    continue
                piece, rest = rest[:left], rest[left:]
                file.write(piece)
                digest.update(piece)
                left -= len(piece)
            file.sync()
        finally:
            file.close()
        if digest.digest() != item.sha256:
            raise CheckpointCorrupt(f"{item.name} does not have the SHA-256 that the node announced")


def held_layers(path: Path, layers: Sequence[str]) -> range:
    """Consecutive layers that a safetensors file's header names. Raises `CheckpointCorrupt`, `OSError`."""
    with _open_received(path) as file:
        names = set(read_header(file, path, _MAX_HEADER_BYTES)[0])
    numbers = [number for number, name in enumerate(layers) if name in names]
    if not numbers or len(numbers) != len(names) or numbers[-1] - numbers[0] + 1 != len(numbers):
        raise CheckpointCorrupt(f"{path.name} does not hold the run's layers")
    return range(numbers[0], numbers[-1] + 1)


def check_layers(path: Path, digests: Mapping[str, bytes]) -> None:
    """Raise `CheckpointCorrupt` unless a safetensors file holds exactly these fp32 layers with these SHA-256."""
    with _open_received(path) as file:
        header, data = read_header(file, path, _MAX_HEADER_BYTES)
        if header.keys() != digests.keys():
            raise CheckpointCorrupt(f"{path.name} does not hold the run's layers")
        for name, digest in digests.items():
            try:
                found = _digest(file, data, header[name])
            except MALFORMED_ERRORS as error:
                raise CheckpointCorrupt(f"{path.name} has a header that does not parse") from error
            if found != digest:
                raise CheckpointCorrupt(f"the SHA-256 of layer {name} in {path.name} is not the manifest's")


def _open_received(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"the node sent no {path.name}") from error


def _digest(file: BinaryIO, data: int, entry: Mapping[str, Any]) -> bytes:
    """SHA-256 of one tensor's bytes; `data` is the offset of the tensors.

    Raises `ValueError`, `KeyError` and the like.
    """
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
        raise CheckpointCorrupt("the node sent two different manifests")
