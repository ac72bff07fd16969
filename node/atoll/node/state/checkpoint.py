"""Checkpoints: committed rounds on disk, each written completely or not at all.

Each round is a directory, `checkpoints/NNNNNNNNN/`. It contains the anchor and the outer momentum (safetensors, one
flat fp32 tensor per layer), the round's manifest, the run spec, and `SHA256SUMS` over them for `sha256sum -c`.

A write uses a temporary name, syncs every file and then the directory, renames it, and syncs the parent. So a power
cut leaves the whole checkpoint or none of it. A checkpoint that does not match its sums and the manifest's digests
is renamed to `NNNNNNNNN.corrupt` and not used.

All functions block: call them in a thread. File system errors become `DataDirUnusable`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from torch import Tensor

from atoll.core import log
from atoll.core.disk import OS_DISK, Bytes, Disk
from atoll.core.errors import AtollError, CheckpointCorrupt, DataDirUnusable
from atoll.core.files import data_dir_unusable, make_private_dir, write_synced
from atoll.core.manifest import Head, parse_and_verify_head
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.state import tensor_file
from atoll.node.state.checkpoint_files import ANCHOR, MANIFEST, MOMENTUM, SPEC, SUMS, read_small_file, read_sums
from atoll.node.state.outer_step import matches_digests
from atoll.node.state.tensor_file import FileMetadata, LayerLayout, ScannedFile, TensorFile
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

_NAME = re.compile(r"\d{9,}")
_LEFTOVER = re.compile(r"\.\d{9,}\.(tmp|old)-[0-9a-f]+")
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)  # the checkpoint is damaged; permissions are fine
_KEPT_EXTRA_ROUNDS = 2

_log = log.get("checkpoint")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from disk; its vectors, fp32 [E], match every digest in the manifest."""

    spec: RunSpec
    head: Head
    layers: LayerLayout
    anchor_E: Tensor
    momentum_E: Tensor


@dataclass(frozen=True)
class CheckpointState:
    """State to write as a checkpoint; vectors fp32 [E] that must not change during the write."""

    head: Head
    layers: LayerLayout
    anchor_E: Tensor
    momentum_E: Tensor


class CheckpointStore:
    """The checkpoints of one run on this node, in their own directory."""

    def __init__(self, directory: Path, spec: RunSpec, *, keep: int, disk: Disk = OS_DISK) -> None:
        self._directory = make_private_dir(directory)
        self._spec = spec
        self._keep = keep  # at least one
        self._disk = disk
        self._writing = threading.Lock()

    def path(self, round_number: int) -> Path:
        """The directory for the checkpoint of that round; it need not exist."""
        return self._directory / f"{round_number:09d}"

    def sweep(self) -> None:
        """Remove half-written and half-removed directories. Only the one daemon that writes here may call this."""
        for path in self._entries(_LEFTOVER):
            _log.info("unfinished checkpoint removed", path=str(path))
            with contextlib.suppress(OSError):
                self._remove(path)

    def held(self) -> tuple[mb.CheckpointInfo, ...]:
        """Describe all checkpoints, newest first, from manifests and headers; does not read the vectors."""
        found = []
        for path in self._newest_first():
            try:
                found.append(describe(path))
            except (AtollError, DecodeError, OSError) as error:
                _log.warning("checkpoint unreadable", path=str(path), reason=str(error))
        return tuple(found)

    def write(
        self,
        state: CheckpointState,
        before_piece: Callable[[], None] = lambda: None,
        extra_rounds: Collection[int] = (),
        kept_rounds: Collection[int] = (),
    ) -> Path:
        """Write `state` durably, then remove checkpoints beyond the newest `keep`; returns the directory.

        Up to `keep` − 1 of them may be `kept_rounds` instead of newer rounds. The newest two of `extra_rounds` are kept
        in addition. Calls `before_piece` before every piece; it may raise to cancel the write. Raises
        `CheckpointCorrupt` when the vectors do not match the manifest, and `DataDirUnusable`; older checkpoints are
        unchanged then.
        """
        head = state.head
        if not _matches_manifest(head, state.layers, state.anchor_E, state.momentum_E):
            raise CheckpointCorrupt(f"the state in memory does not match the digests of round {head.round}")
        target = self.path(head.round)
        with self._writing:
            if not self._holds(target, head, state.layers):
                try:
                    self._place(self._contents(state), target, before_piece)
                except OSError as error:
                    raise data_dir_unusable(target, error) from error
            self._void_later_than(target)
            self._drop_older(extra_rounds, kept_rounds)
        return target

    def newest(self, layers: LayerLayout) -> Checkpoint | None:
        """Read the newest undamaged checkpoint of this model, with all or some of its `layers`.

        Sets damaged newer ones aside and logs a warning. Raises `DataDirUnusable` when the directory cannot be read.
        """
        return self._first_of(self._newest_first(), layers)

    def of_round(self, number: int, layers: LayerLayout) -> Checkpoint | None:
        """Read the checkpoint of one round; None when it is missing, damaged or of another model."""
        path = self.path(number)
        return self._first_of([path] if path.exists() else [], layers)

    def _first_of(self, paths: Iterable[Path], layers: LayerLayout) -> Checkpoint | None:
        for path in paths:
            try:
                found = read_checkpoint(path)
                if found.spec.run.name != self._spec.run.name or found.layers != layers.part(found.layers.numbers):
                    raise CheckpointCorrupt(f"{path} belongs to another run or model")
                if path != self.path(found.head.round):
                    raise CheckpointCorrupt(f"{path} contains round {found.head.round}")
                return found
            except CheckpointCorrupt as error:
                _log.warning("checkpoint not used", path=str(path), reason=str(error))
                self._set_aside(path, "corrupt")
        return None

    # --- writing -------------------------------------------------------------------------------------

    def _contents(self, state: CheckpointState) -> dict[str, Iterable[Bytes]]:
        facts = _facts(state.head, state.layers)
        return {
            ANCHOR: tensor_file.chunks(state.layers, facts, state.anchor_E),
            MOMENTUM: tensor_file.chunks(state.layers, facts, state.momentum_E),
            MANIFEST: [state.head.committed.SerializeToString(deterministic=True)],
            SPEC: [self._spec.resolved_toml().encode()],
        }

    def _place(self, contents: Mapping[str, Iterable[Bytes]], target: Path, before_piece: Callable[[], None]) -> None:
        temporary = self._hidden(target, "tmp")
        try:
            self._disk.mkdir(temporary, 0o700)
            sums = ""
            for name, pieces in contents.items():
                hasher = hashlib.sha256()
                write_synced(temporary / name, _observed(pieces, hasher.update, before_piece), disk=self._disk)
                sums += f"{hasher.hexdigest()}  {name}\n"
            write_synced(temporary / SUMS, sums.encode(), disk=self._disk)
            self._disk.sync_directory(temporary)
            if target.exists():  # an abandoned history has the same round number
                self._set_aside(target, "void")
            self._disk.rename(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove(temporary)
            raise
        self._disk.sync_directory(self._directory)

    def _void_later_than(self, target: Path) -> None:
        """Set aside later rounds: rounds only grow within a history, so these belong to an abandoned one."""
        for path in self._newest_first():
            if int(path.name) > int(target.name):
                self._set_aside(path, "void")

    def _drop_older(self, extra_rounds: Collection[int], kept_rounds: Collection[int]) -> None:
        found = self._newest_first()
        held_back = [path for path in found if int(path.name) in kept_rounds][: self._keep - 1]
        others = [path for path in found if path not in held_back]
        extra = [path for path in others if int(path.name) in extra_rounds]
        newest = [path for path in others if path not in extra][: self._keep - len(held_back)]
        kept = {*held_back, *extra[:_KEPT_EXTRA_ROUNDS], *newest}
        for path in found:
            if path in kept:
                continue
            try:
                retired = self._hidden(path, "old")
                self._disk.rename(path, retired)
                # otherwise a power cut could leave half of the files under the checkpoint's name
                self._disk.sync_directory(self._directory)
                self._remove(retired)
            except OSError as error:
                _log.warning("old checkpoint not removed", path=str(path), reason=str(error))

    def _remove(self, path: Path) -> None:
        for file in path.iterdir():
            self._disk.unlink(file)
        self._disk.rmdir(path)

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_name(f"{path.name}.{why}")
        if aside.exists():
            aside = path.with_name(f"{path.name}.{why}-{secrets.token_hex(4)}")
        try:
            self._disk.rename(path, aside)
            self._disk.sync_directory(self._directory)
        except OSError as error:
            _log.warning("checkpoint not set aside", path=str(path), reason=str(error))
        else:
            _log.warning("checkpoint set aside; remove it when you no longer need it", path=str(aside))

    def _hidden(self, path: Path, kind: str) -> Path:
        return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")

    # --- listing -------------------------------------------------------------------------------------

    def _newest_first(self) -> list[Path]:
        return sorted(self._entries(_NAME), key=lambda path: int(path.name), reverse=True)

    def _entries(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            return [path for path in self._directory.iterdir() if pattern.fullmatch(path.name)]
        except OSError as error:
            raise data_dir_unusable(self._directory, error) from error

    def _holds(self, path: Path, head: Head, layers: LayerLayout) -> bool:
        try:
            return describe(path).manifest_hash == head.hash and tensor_file.read_layers(path / ANCHOR) == layers
        except (AtollError, DecodeError, OSError):
            return False


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read a checkpoint and check all its bytes. Raises `CheckpointCorrupt` and `DataDirUnusable`."""
    with checkpoint_errors(directory):
        metadata = read_metadata(directory)
        anchor, momentum = (tensor_file.read(directory / name) for name in (ANCHOR, MOMENTUM))
    require_files(directory, metadata, anchor, momentum)
    if not _matches_manifest(metadata.head, anchor.layers, anchor.vector_E, momentum.vector_E):
        raise CheckpointCorrupt(f"{directory}: a layer does not match its digest in the manifest")
    return Checkpoint(metadata.spec, metadata.head, anchor.layers, anchor.vector_E, momentum.vector_E)


@dataclass(frozen=True)
class ScannedCheckpoint:
    """A checkpoint of which every byte was checked; its vectors are still on disk only."""

    head: Head
    layers: LayerLayout
    anchor_sha256: str  # hex, of the anchor's file


def scan_checkpoint(directory: Path) -> ScannedCheckpoint:
    """Check every byte of a checkpoint, a chunk in memory at a time. Raises `CheckpointCorrupt`, `DataDirUnusable`."""
    with checkpoint_errors(directory):
        metadata = read_metadata(directory)
        anchor, momentum = (_scan(directory / name) for name in (ANCHOR, MOMENTUM))
    require_files(directory, metadata, anchor, momentum)
    states = metadata.head.manifest.layers[anchor.layers.numbers]
    digests = list(zip(anchor.digests, momentum.digests, strict=True))
    if [(it.anchor_digest, it.momentum_digest) for it in states] != digests:
        raise CheckpointCorrupt(f"{directory}: a layer does not match its digest in the manifest")
    return ScannedCheckpoint(metadata.head, anchor.layers, anchor.sha256)


def read_anchor_into(directory: Path, scanned: ScannedCheckpoint, anchor_E: Tensor) -> None:
    """Read the anchor of a checkpoint that was scanned. Raises `CheckpointCorrupt`, `DataDirUnusable`."""
    with checkpoint_errors(directory):
        if tensor_file.read_into(directory / ANCHOR, anchor_E) != scanned.anchor_sha256:
            raise CheckpointCorrupt(f"{directory / ANCHOR} changed while it was read")


def _scan(path: Path) -> ScannedFile:
    with path.open("rb", buffering=0) as file:
        return tensor_file.scan(file, path)


@dataclass(frozen=True)
class CheckpointMetadata:
    """Everything in a checkpoint except its vectors."""

    spec: RunSpec
    head: Head
    sums: Mapping[str, str]  # hex SHA-256 by file name


def read_metadata(directory: Path) -> CheckpointMetadata:
    """Read a checkpoint's small files; checks their sums and the votes' signatures.

    Call it inside `checkpoint_errors`, which translates the errors that it raises.
    """
    sums = read_sums(directory)
    spec = parse_run_spec(_small(directory, SPEC, sums).decode(), str(directory / SPEC))
    committed = manifest_pb2.CommittedManifest.FromString(_small(directory, MANIFEST, sums))
    return CheckpointMetadata(spec, parse_and_verify_head(committed, spec.run.name), sums)


@contextlib.contextmanager
def checkpoint_errors(directory: Path) -> Iterator[None]:
    """Translate errors of the block into `CheckpointCorrupt` or `DataDirUnusable`."""
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE:
            raise CheckpointCorrupt(f"{directory} is incomplete: {error.strerror or error}") from error
        raise data_dir_unusable(directory, error) from error
    except (CheckpointCorrupt, DataDirUnusable):
        raise
    except (AtollError, DecodeError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{directory}: {error}") from error


def require_files(
    directory: Path, metadata: CheckpointMetadata, anchor: TensorFile | ScannedFile, momentum: TensorFile | ScannedFile
) -> None:
    """Raise `CheckpointCorrupt` unless both files match their sums, the manifest's round and each other's layers."""
    if (anchor.sha256, momentum.sha256) != (metadata.sums[ANCHOR], metadata.sums[MOMENTUM]):
        raise CheckpointCorrupt(f"{directory}: the vectors do not match their sums in {SUMS}")
    facts = _facts(metadata.head, anchor.layers)
    if anchor.facts != facts or momentum.facts != facts or anchor.layers != momentum.layers:
        raise CheckpointCorrupt(f"{directory}: the vectors do not belong to the manifest's round")


def _matches_manifest(head: Head, layers: LayerLayout, anchor_E: Tensor, momentum_E: Tensor) -> bool:
    """Whether the vectors match the manifest's digests of these layers."""
    states = head.manifest.layers[layers.numbers]
    return matches_digests(states, anchor_E, momentum_E, layers.offsets, layers.first)


def _facts(head: Head, layers: LayerLayout) -> FileMetadata:
    facts: dict[str, str | int] = {
        "run": head.manifest.round.run_id,
        "round": head.round,
        "manifest": head.hash.hex(),
    }
    if len(layers.names) < len(head.manifest.layers):
        facts[tensor_file.FIRST_LAYER] = layers.first
    return facts


def _head_of(path: Path) -> Head:
    return Head(manifest_pb2.CommittedManifest.FromString(read_small_file(path / MANIFEST)))


def describe(path: Path) -> mb.CheckpointInfo:
    """Describe a checkpoint from its manifest and a header. Raises `AtollError`, `DecodeError` and `OSError`."""
    manifest_path, head = path / MANIFEST, _head_of(path)
    layers = tensor_file.read_layers(path / ANCHOR)
    return mb.CheckpointInfo(
        round=head.round,
        manifest_hash=head.hash,
        bytes=sum(file.stat().st_size for file in path.iterdir()),
        written_unix_ms=manifest_path.stat().st_mtime_ns // 1_000_000,
        committed_tokens=head.committed_tokens,
        layers=plan_pb2.Span(first=layers.first, last=layers.first + len(layers.names) - 1),
    )


def rounds_in(folder: Path) -> list[Path]:
    """The directories in a folder of checkpoints; empty if there is no such folder."""
    try:
        return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []


def _small(directory: Path, name: str, sums: Mapping[str, str]) -> bytes:
    data = read_small_file(directory / name)
    if hashlib.sha256(data).hexdigest() != sums[name]:
        raise CheckpointCorrupt(f"{directory / name} does not match its sum")
    return data


def _observed(
    pieces: Iterable[Bytes], seen: Callable[[Bytes], None], before_piece: Callable[[], None]
) -> Iterator[Bytes]:
    for piece in pieces:
        before_piece()
        seen(piece)
        yield piece
