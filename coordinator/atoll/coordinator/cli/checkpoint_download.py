"""Checkpoints that arrive message by message, written so that they are there whole and true, or not at all.

Files go under a temporary name beside the target. Sizes and SHA-256 must be those announced, every layer's digest the
manifest's, and the manifest must carry votes, all of them genuine; then all is synced and renamed. Whether the votes
are enough is the coordinator's to know, which knows who decides: it passes nothing on else (`runs/checkpoints.py`).
Where nodes hold some layers each, their checkpoints come at the same time, and a directory of directories is made of
them, of one round and with all layers. Needs neither torch nor safetensors.
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
    """What is there now."""

    head: Head
    parts: tuple[str, ...]  # directories in the target; none where it is itself a checkpoint of all layers


def receive(
    messages: Iterator[mb.CheckpointUpload],
    target: Path,
    run_id: str,
    layers: Sequence[str],
    progress: Callable[[int, int], None],
) -> DownloadedCheckpoint:
    """Write what `messages` bring to the directory `target`; `progress` is told bytes so far and in all.

    `layers` are the names in the layer table. Raises `AlreadyExists`, `CheckpointCorrupt`, `DataDirUnusable`, and
    what reading the messages raises; nothing is left behind then.
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
    """Raise `AlreadyExists` unless `target` is free, or an empty directory; `DataDirUnusable` if that is unknown."""
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
        raise CheckpointCorrupt(f"{count} checkpoints were announced of a model of {len(layers)} layers")
    arriving: dict[int, _CheckpointWriter] = {}
    with ExitStack() as held:
        message: mb.CheckpointUpload | None = first
        while message is not None:
            if message.HasField("opening"):
                if message.part in arriving or message.part >= count:
                    raise CheckpointCorrupt("another checkpoint came than was announced")
                place = directory if count == 1 else directory / str(message.part)
                arriving[message.part] = held.enter_context(closing(_CheckpointWriter(place, message.opening, run_id)))
            elif message.part not in arriving or not message.data:
                raise CheckpointCorrupt("the checkpoint ended before all of it had come", "try again")
            else:
                arriving[message.part].take(message.data)
                announced = sum(each.bytes for each in arriving.values())
                progress(sum(each.bytes_received for each in arriving.values()), announced * count // len(arriving))
            complete = len(arriving) == count and all(each.complete for each in arriving.values())
            message = None if complete else next(messages, None)
    if len(arriving) < count or not all(each.complete for each in arriving.values()):
        raise CheckpointCorrupt("the checkpoint ended before all of it had come", "try again")
    return _verify_and_name(directory, list(arriving.values()), layers)


def _verify_and_name(
    directory: Path, arrived: Sequence[_CheckpointWriter], layers: Sequence[str]
) -> DownloadedCheckpoint:
    """Check what came against its manifest, and name it by its layers."""
    head, names, known = arrived[0].head, list[str](), set[int]()
    for each in arrived:
        if each.head.hash != head.hash:
            raise CheckpointCorrupt(f"what came is of two states: rounds {head.round} and {each.head.round}")
        held = each.check(layers)
        known.update(held)
        if len(arrived) > 1:
            names.append(f"layers-{held.start}-{held.stop - 1}")
            OS_DISK.sync_directory(each.directory)
            OS_DISK.rename(each.directory, directory / names[-1])
    if missing := set(range(len(layers))) - known:
        raise CheckpointCorrupt(f"what came does not hold {layers_text(missing)}")
    return DownloadedCheckpoint(head, tuple(sorted(names, key=lambda name: int(name.split("-")[1]))))


class _CheckpointWriter:
    """One checkpoint that comes."""

    def __init__(self, directory: Path, opening: mb.CheckpointOpening, run_id: str) -> None:
        """Raises `CheckpointCorrupt`, `OSError`."""
        files = {item.name: item for item in opening.files}
        if not files or len(files) != len(opening.files) or not all(_NAME.fullmatch(name) for name in files):
            raise CheckpointCorrupt("the node sent no files, or some with names that cannot be")
        self.head = parse_and_verify_head(opening.manifest, run_id)
        if not self.head.signers:
            raise CheckpointCorrupt(f"nobody voted for the manifest of round {self.head.round} that the node sent")
        if self.head.round != opening.round:
            raise CheckpointCorrupt(f"the node sent the manifest of round {self.head.round} for round {opening.round}")
        self.directory = directory
        self.bytes, self.bytes_received = sum(item.bytes for item in files.values()), 0
        self._manifest, self._manifest_sent = opening.manifest, MANIFEST in files
        directory.mkdir(exist_ok=True)
        self._file_writer = _write(directory, list(files.values()))
        self.complete = False
        self._feed_writer(None)

    def take(self, data: bytes) -> None:
        """The next bytes of its files. Raises `CheckpointCorrupt`, `OSError`."""
        self.bytes_received += len(data)
        if self.complete or self.bytes_received > self.bytes:
            raise CheckpointCorrupt("the node sent more than it announced")
        self._feed_writer(data)

    def close(self) -> None:
        """Nothing more is written."""
        self._file_writer.close()

    def check(self, layers: Sequence[str]) -> range:
        """The layers that it holds, all of them true. Raises `CheckpointCorrupt`, `OSError`."""
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
    """Is sent the bytes of all files, and cuts them anew where files end. Raises `CheckpointCorrupt`, `OSError`."""
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
    """The consecutive layers that a safetensors file says it holds. Raises `CheckpointCorrupt`, `OSError`."""
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
                raise CheckpointCorrupt(f"layer {name} in {path.name} is not what the manifest says")


def _open_received(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"the node sent no {path.name}") from error


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
