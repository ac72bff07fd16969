"""Read and write one flat fp32 vector as a safetensors file with one tensor per layer, in the order of the model.

Equal vectors must give equal files on every node. So this module writes the header itself: the safetensors library
does not fix the order of its entries, and copies the data. Reading is strict: the header must equal, byte for byte, the
one that this module writes.

Shape suffix: E all elements.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from atoll.core.disk import Bytes
from atoll.core.errors import CheckpointCorrupt
from atoll.v1 import plan_pb2

CHUNK_BYTES = 4 << 20
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 16 << 20
_FP32_BYTES = 4
_METADATA_KEY = "atoll"  # a single key, because the safetensors library writes several in any order

FIRST_LAYER = "first_layer"  # metadata key in a file of some layers; a file of all layers lacks it

FileMetadata = Mapping[str, str | int]


@dataclass(frozen=True)
class LayerLayout:
    """Names of consecutive layers and their element offsets in their flat vector."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]  # one more than names
    first: int = 0  # number of the first layer in the model

    @classmethod
    def of(cls, table: plan_pb2.LayerTable, held: range | None = None) -> LayerLayout:
        """The layout of a layer table, or of its `held` layers."""
        rows = table.layers if held is None else table.layers[held.start : held.stop]
        offsets = [0]
        for row in rows:
            offsets.append(offsets[-1] + row.parameters)
        return cls(tuple(row.name for row in rows), tuple(offsets), held.start if held is not None else 0)

    def part(self, numbers: slice) -> LayerLayout:
        """The layout of the layers with these numbers; `self` must be the layout of the whole model."""
        start = self.offsets[min(numbers.start, len(self.offsets) - 1)]
        offsets = tuple(offset - start for offset in self.offsets[numbers.start : numbers.stop + 1])
        return LayerLayout(self.names[numbers], offsets, numbers.start)

    @property
    def numbers(self) -> slice:
        """The numbers of these layers in the model."""
        return slice(self.first, self.first + len(self.names))

    @property
    def elements(self) -> int:
        return self.offsets[-1]


@dataclass(frozen=True)
class TensorFile:
    """The contents of a file."""

    facts: FileMetadata
    layers: LayerLayout
    vector_E: Tensor
    sha256: str  # hex, of the file


@dataclass(frozen=True)
class ScannedFile:
    """The contents of a file, with digests in place of the values."""

    facts: FileMetadata
    layers: LayerLayout
    digests: tuple[bytes, ...]  # SHA-256 of every layer's bytes
    sha256: str  # hex, of the file
    data_offset: int  # bytes before the first layer's values


def chunks(layers: LayerLayout, facts: FileMetadata, vector_E: Tensor) -> Iterator[Bytes]:
    """Yield the bytes of the file: the header, then chunks of at most `CHUNK_BYTES`."""
    yield _header(layers, facts)
    data = bytes_of(vector_E)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def read(path: Path) -> TensorFile:
    """Read the whole file. Raises `CheckpointCorrupt` unless `chunks` could have written it, and `OSError`."""
    with path.open("rb") as file:
        layers, facts, header = _begin(file, path)
        vector_E = torch.empty(layers.elements)
        target = bytes_of(vector_E)
        if file.readinto(target) != len(target):
            raise CheckpointCorrupt(f"{path} is truncated")
    hasher = hashlib.sha256(header)
    hasher.update(target)
    return TensorFile(facts, layers, vector_E, hasher.hexdigest())


def read_into(path: Path, vector_E: Tensor) -> str:
    """Read the values into `vector_E`, a chunk at a time; returns the file's SHA-256 in hex.

    Raises `CheckpointCorrupt`, also if the number of values differs from `vector_E`, and `OSError`.
    """
    with path.open("rb", buffering=0) as file:
        layers, _, header = _begin(file, path)
        if layers.elements != vector_E.numel():
            raise CheckpointCorrupt(f"{path} has {layers.elements} values; must have {vector_E.numel()}")
        whole, target, filled = hashlib.sha256(header), bytes_of(vector_E), 0
        while filled < len(target):
            count = file.readinto(target[filled : filled + CHUNK_BYTES])
            if not count:
                raise CheckpointCorrupt(f"{path} is truncated")
            whole.update(target[filled : filled + count])
            filled += count
    return whole.hexdigest()


def scan(file: BinaryIO, path: Path) -> ScannedFile:
    """Check the file like `read`, but hold one chunk in memory at a time. Raises `CheckpointCorrupt` and `OSError`."""
    layers, facts, header = _begin(file, path)
    whole, digests = hashlib.sha256(header), []
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for start, end in pairwise(layers.offsets):
        left, digest = _FP32_BYTES * (end - start), hashlib.sha256()
        while left:
            count = file.readinto(buffer[: min(left, CHUNK_BYTES)])  # type: ignore[attr-defined]  # binary files have it
            if not count:
                raise CheckpointCorrupt(f"{path} is truncated")
            whole.update(buffer[:count])
            digest.update(buffer[:count])
            left -= count
        digests.append(digest.digest())
    return ScannedFile(facts, layers, tuple(digests), whole.hexdigest(), len(header))


def read_layers(path: Path) -> LayerLayout:
    """Read the layout in the header; does not check or read the values. Raises `CheckpointCorrupt`, `OSError`."""
    with path.open("rb") as file, _header_errors(path):
        return _parse(_read_header(file, path))[0]


def _begin(file: BinaryIO, path: Path) -> tuple[LayerLayout, FileMetadata, bytes]:
    """Read and check the header; returns its contents and its bytes. Raises `CheckpointCorrupt`, `OSError`."""
    raw = _read_header(file, path)
    with _header_errors(path):
        layers, facts = _parse(raw)
        canonical = _header(layers, facts)
    if canonical[8:] != raw:
        raise CheckpointCorrupt(f"{path}: the header differs from the one that Atoll writes")
    size = len(canonical) + _FP32_BYTES * layers.elements
    if os.fstat(file.fileno()).st_size != size:
        raise CheckpointCorrupt(f"{path}: the file does not have the {size} bytes that its header describes")
    return layers, facts, canonical


@contextlib.contextmanager
def _header_errors(path: Path) -> Iterator[None]:
    """Turn the errors of parsing arbitrary JSON as a header into `CheckpointCorrupt`."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path}: the header differs from the one that Atoll writes") from error


def _read_header(file: BinaryIO, path: Path) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise CheckpointCorrupt(f"{path}: the header has {length} bytes; at most {_MAX_HEADER_BYTES} are allowed")
    raw = file.read(length)
    if len(raw) != length:
        raise CheckpointCorrupt(f"{path} is truncated")
    return raw


def _parse(raw: bytes) -> tuple[LayerLayout, FileMetadata]:
    entries = json.loads(raw)
    facts = json.loads(entries.pop("__metadata__")[_METADATA_KEY])
    offsets = [0]
    for entry in entries.values():
        offsets.append(offsets[-1] + int(entry["shape"][0]))
    return LayerLayout(tuple(entries), tuple(offsets), int(facts.get(FIRST_LAYER, 0))), facts


def _header(layers: LayerLayout, facts: FileMetadata) -> bytes:
    entries: dict[str, object] = {"__metadata__": {_METADATA_KEY: json.dumps(dict(facts))}}
    for name, (start, end) in zip(layers.names, pairwise(layers.offsets), strict=True):
        where = [_FP32_BYTES * start, _FP32_BYTES * end]
        entries[name] = {"dtype": "F32", "shape": [end - start], "data_offsets": where}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def bytes_of(vector_E: Tensor) -> memoryview:
    """The memory of a contiguous fp32 tensor on the host."""
    return vector_E.numpy().data.cast("B") if vector_E.numel() else memoryview(bytearray())
