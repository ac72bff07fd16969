"""Writer of safetensors files, tensor by tensor in any order, with one tensor in memory at a time.

Shapes are known before values. So every file gets its header and its full size first, and each tensor is written to its
place when it is computed. File names, shard sizes and the index follow `transformers`. Within a file, tensors are in
the order of their names, so that the file has the same bytes as one written by the format's own library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.node.export.stored_model import StoredModel
from atoll.node.model.flat_layout import Slot

_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8
_CHUNK_ELEMENTS = 1 << 20

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are computed together, fp32 on the host."""

    shapes: Mapping[str, Shape]
    make: Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class _TensorLocation:
    descriptor: int
    offset: int  # bytes


@dataclass(frozen=True)
class OutputFormat:
    """Directory, dtype and shard size of the files."""

    directory: Path
    dtype: torch.dtype
    shard_bytes: float = math.inf


def stored_tensor_group(model: StoredModel, slot: Slot, name: str) -> TensorGroup:
    """Make a group of one trained parameter, under the name `name`."""

    def make() -> dict[str, Tensor]:
        return {name: model.read(slot.offset, slot.offset + slot.elements).view(slot.shape)}

    return TensorGroup({name: slot.shape}, make)


def write(output_format: OutputFormat, tensor_groups: Sequence[TensorGroup], stem: str = "model") -> None:
    """Write `stem.safetensors`, or an index and shards of at most `shard_bytes` (or one tensor).

    Nothing is synced. Raises `OSError`, before any tensor is made if the disk is full; `AtollError` if a group makes
    other tensors than it announced; and the errors of `make`.
    """
    shapes = {name: shape for group in tensor_groups for name, shape in group.shapes.items()}
    directory, dtype = output_format.directory, output_format.dtype
    sizes = {name: dtype.itemsize * torch.Size(shape).numel() for name, shape in shapes.items()}
    shards = _split(sizes, output_format.shard_bytes)
    with ExitStack() as exit_stack:
        locations: dict[str, _TensorLocation] = {}
        for number, names in enumerate(shards, 1):
            path = directory / _file_name(stem, number, len(shards))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            exit_stack.callback(os.close, descriptor)
            locations |= _write_header(descriptor, names, shapes, sizes, dtype)
        for group in tensor_groups:
            made = group.make()
            if {name: tuple(each.shape) for name, each in made.items()} != dict(group.shapes):
                raise AtollError(f"a group made other tensors than announced: {', '.join(sorted(group.shapes))[:200]}")
            while made:
                name, tensor = made.popitem()
                _write_tensor(locations.pop(name), tensor, dtype)
    if locations:
        raise AtollError(f"tensors were announced and never made: {', '.join(sorted(locations))[:200]}")
    if len(shards) > 1:
        _write_index(directory / f"{stem}.safetensors.index.json", stem, shards, shapes, sizes)


def _split(sizes: Mapping[str, int], shard_bytes: float) -> list[list[str]]:
    """Split names into shards, in the given order. A tensor that is too large gets a shard of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _file_name(stem: str, number: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def _write_header(
    descriptor: int, names: Iterable[str], shapes: Mapping[str, Shape], sizes: Mapping[str, int], dtype: torch.dtype
) -> dict[str, _TensorLocation]:
    """Write the header and allocate the file; return the location of each tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(names):
        where = [end, end + sizes[name]]
        entries[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shapes[name]), "data_offsets": where}
        offsets[name], end = where
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, len(header) + end)
    _write_at(descriptor, header, 0)
    return {name: _TensorLocation(descriptor, len(header) + offset) for name, offset in offsets.items()}


def _write_tensor(location: _TensorLocation, tensor: Tensor, dtype: torch.dtype) -> None:
    offset = location.offset
    flat_E = tensor.contiguous().view(-1)
    for start in range(0, len(flat_E), _CHUNK_ELEMENTS):
        data = flat_E[start : start + _CHUNK_ELEMENTS].to(dtype).view(torch.uint8).numpy().data
        _write_at(location.descriptor, data, offset)
        offset += len(data)


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count


def _write_index(
    path: Path, stem: str, shards: Sequence[Sequence[str]], shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> None:
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    files = {name: _file_name(stem, number, len(shards)) for number, names in enumerate(shards, 1) for name in names}
    document = {"metadata": {"total_parameters": elements, "total_size": sum(sizes.values())}, "weight_map": files}
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
