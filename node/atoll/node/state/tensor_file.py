"""One flat fp32 vector as a safetensors file: a tensor a layer, in the order of the model, streamed both ways.

Equal vectors are equal files on every node, so the header is written here: the format's own library orders and
copies as it likes. Reading is strict. A header must be, byte for byte, the one that writing would make.

Shape suffix: E all elements.
"""

from __future__ import annotations

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
_METADATA_KEY = "atoll"  # one key, because the format's library writes several in any order

FIRST_LAYER = "first_layer"  # the fact that a file of some layers has, and one of all of them has not

FileMetadata = Mapping[str, str | int]


@dataclass(frozen=True)
class LayerLayout:
    """Names of consecutive layers, and where each lies in their flat vector (one offset more than names)."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    first: int = 0  # the number of the first one in the model

    @classmethod
    def of(cls, table: plan_pb2.LayerTable, held: range | None = None) -> LayerLayout:
        """Those of a layer table, or those that are `held`."""
        rows = table.layers if held is None else table.layers[held.start : held.stop]
        offsets = [0]
        for row in rows:
            offsets.append(offsets[-1] + row.parameters)
        return cls(tuple(row.name for row in rows), tuple(offsets), held.start if held is not None else 0)

    def part(self, numbers: slice) -> LayerLayout:
        """Those with these numbers; `self` holds all of them."""
        start = self.offsets[min(numbers.start, len(self.offsets) - 1)]
        offsets = tuple(offset - start for offset in self.offsets[numbers.start : numbers.stop + 1])
        return LayerLayout(self.names[numbers], offsets, numbers.start)

    @property
    def numbers(self) -> slice:
        """Where they stand in the model."""
        return slice(self.first, self.first + len(self.names))

    @property
    def elements(self) -> int:
        return self.offsets[-1]


@dataclass(frozen=True)
class TensorFile:
    """What a file holds."""

    facts: FileMetadata
    layers: LayerLayout
    vector_E: Tensor
    sha256: str  # hex, of the file


@dataclass(frozen=True)
class ScannedFile:
    """What a file holds, but for the numbers."""

    facts: FileMetadata
    layers: LayerLayout
    digests: tuple[bytes, ...]  # SHA-256 of every layer's bytes
    sha256: str  # hex, of the file
    data_offset: int  # bytes before the first layer's


def chunks(layers: LayerLayout, facts: FileMetadata, vector_E: Tensor) -> Iterator[Bytes]:
    """The bytes of the file, in pieces of at most `CHUNK_BYTES`."""
    yield _header(layers, facts)
    data = bytes_of(vector_E)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def read(path: Path) -> TensorFile:
    """The whole file. Raises `CheckpointCorrupt` unless `chunks` could have written it, and `OSError`."""
    with path.open("rb") as file:
        layers, facts, header = _begin(file, path)
        vector_E = torch.empty(layers.elements)
        target = bytes_of(vector_E)
        if file.readinto(target) != len(target):
            raise CheckpointCorrupt(f"{path} ends too early")
    hasher = hashlib.sha256(header)
    hasher.update(target)
    return TensorFile(facts, layers, vector_E, hasher.hexdigest())


def scan(file: BinaryIO, path: Path) -> ScannedFile:
    """As `read`, with a piece of the file in memory at a time. Raises `CheckpointCorrupt` and `OSError`."""
    layers, facts, header = _begin(file, path)
    whole, digests = hashlib.sha256(header), []
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for start, end in pairwise(layers.offsets):
        left, digest = _FP32_BYTES * (end - start), hashlib.sha256()
        while left:
            count = file.readinto(buffer[: min(left, CHUNK_BYTES)])  # type: ignore[attr-defined]  # of every real file
            if not count:
                raise CheckpointCorrupt(f"{path} ends too early")
            whole.update(buffer[:count])
            digest.update(buffer[:count])
            left -= count
        digests.append(digest.digest())
    return ScannedFile(facts, layers, tuple(digests), whole.hexdigest(), len(header))


def read_layers(path: Path) -> LayerLayout:
    """What a file says that it holds; its bytes are not looked at. Raises `CheckpointCorrupt`, `OSError`."""
    with path.open("rb") as file:
        try:
            return _parse(_read_header(file, path))[0]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise CheckpointCorrupt(f"{path}: the header is not one of ours") from error


def _begin(file: BinaryIO, path: Path) -> tuple[LayerLayout, FileMetadata, bytes]:
    """What the header says, and all bytes before the first layer's. Raises `CheckpointCorrupt`, `OSError`."""
    raw = _read_header(file, path)
    try:
        layers, facts = _parse(raw)
        canonical = _header(layers, facts)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path}: the header is not one of ours") from error
    if canonical[8:] != raw:
        raise CheckpointCorrupt(f"{path}: the header is not one of ours")
    if os.fstat(file.fileno()).st_size != len(canonical) + _FP32_BYTES * layers.elements:
        raise CheckpointCorrupt(f"{path} has another size than its header says")
    return layers, facts, canonical


def _read_header(file: BinaryIO, path: Path) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise CheckpointCorrupt(f"{path}: the header is not one of ours")
    raw = file.read(length)
    if len(raw) != length:
        raise CheckpointCorrupt(f"{path} ends too early")
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
    """Of a contiguous tensor on the host, as they lie in memory."""
    return vector_E.numpy().data.cast("B") if vector_E.numel() else memoryview(bytearray())
