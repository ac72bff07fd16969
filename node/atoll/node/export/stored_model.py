"""A model that stays on disk: the anchors of checked checkpoints, of which any part can be read.

A checkpoint of a node contains the layers that the node held. `join_checkpoints` combines those of several nodes.

The check reads one piece of a file into memory at a time. The files then stay open, so a training node may delete a
checkpoint while it is exported.

Shape suffix: E elements to read.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from atoll.core.errors import CheckpointCorrupt, NotFound
from atoll.core.manifest import Head
from atoll.core.run_spec import RunSpec
from atoll.core.units import layers_text
from atoll.node.state import tensor_file
from atoll.node.state.checkpoint import checkpoint_errors, read_metadata, require_files
from atoll.node.state.checkpoint_files import ANCHOR, MOMENTUM, SUMS
from atoll.node.state.tensor_file import LayerLayout, bytes_of
from atoll.v1 import manifest_pb2

_FP32_BYTES = 4


@dataclass(frozen=True)
class LayerLocation:
    """The file and the offset at which a layer's anchor begins."""

    file: BinaryIO
    offset: int  # bytes


@dataclass(frozen=True)
class StoredModel:
    """The anchor of consecutive layers after one round."""

    spec: RunSpec
    head: Head
    layers: LayerLayout
    layer_locations: tuple[LayerLocation, ...]  # by layer

    def read(self, start: int, end: int) -> Tensor:
        """Read elements `start … end - 1` of the flat vector, within one layer, as a new fp32 tensor [E].

        Raises `CheckpointCorrupt` if the file became shorter or unreadable after the check.
        """
        layer = bisect_right(self.layers.offsets, start) - 1
        vector_E = torch.empty(end - start)
        if start == end:
            return vector_E
        if end > self.layers.offsets[layer + 1]:
            raise ValueError(f"elements {start} to {end} are not in one layer")
        location, left = self.layer_locations[layer], bytes_of(vector_E)
        offset = location.offset + _FP32_BYTES * (start - self.layers.offsets[layer])
        while left:
            try:
                count = os.preadv(location.file.fileno(), [left], offset)
            except OSError as error:
                raise CheckpointCorrupt(f"{location.file.name} cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointCorrupt(f"{location.file.name} was cut short while it was read")
            left, offset = left[count:], offset + count
        return vector_E


def open_checkpoint(directory: Path, exit_stack: ExitStack) -> StoredModel:
    """Open a checkpoint and check every byte; `exit_stack` closes its files.

    Raises `CheckpointCorrupt` and `DataDirUnusable`.
    """
    with checkpoint_errors(directory):
        frame = read_metadata(directory)
        file = exit_stack.enter_context((directory / ANCHOR).open("rb", buffering=0))
        anchor = tensor_file.scan(file, directory / ANCHOR)
        with (directory / MOMENTUM).open("rb", buffering=0) as other:
            momentum = tensor_file.scan(other, directory / MOMENTUM)
    require_files(directory, frame, anchor, momentum)
    layers, states = anchor.layers, frame.head.manifest.layers[anchor.layers.numbers]
    pairs = zip(anchor.digests, momentum.digests, strict=True)
    found = [
        manifest_pb2.LayerState(layer=layer, round=state.round, anchor_digest=ours, momentum_digest=moved)
        for layer, (state, (ours, moved)) in enumerate(zip(states, pairs, strict=False), layers.first)
    ]
    if found != list(states) or len(found) != len(layers.names):
        raise CheckpointCorrupt(f"{directory}: a layer does not match its digest in the manifest")
    layer_locations = [LayerLocation(file, anchor.data_offset + _FP32_BYTES * offset) for offset in layers.offsets[:-1]]
    return StoredModel(frame.spec, frame.head, layers, tuple(layer_locations))


def checkpoints_in(directory: Path) -> Sequence[Path]:
    """List the checkpoints in a directory.

    The result is the directory itself if it is a checkpoint or contains none.
    """
    if (directory / SUMS).exists() or not directory.is_dir():
        return [directory]
    return sorted(path.parent for path in directory.glob(f"*/{SUMS}")) or [directory]


def holds_checkpoints(directory: Path) -> bool:
    """Whether a directory is a checkpoint or contains some."""
    return any((path / SUMS).exists() for path in checkpoints_in(directory))


def join_checkpoints(models: Sequence[StoredModel]) -> StoredModel:
    """Join checkpoints of one round to all layers of the model, without reading tensors.

    `models` has at least one entry; they may overlap and be in any order. Raises `CheckpointCorrupt` if they are of
    different rounds, and `NotFound`, which names the layers that no checkpoint holds.
    """
    one = models[0]
    if any(item.head.hash != one.head.hash for item in models):
        rounds = ", ".join(str(item.head.round) for item in models)
        raise CheckpointCorrupt(
            f"these checkpoints are not of one round, but of {rounds}", "choose one round with --round"
        )
    known: dict[int, tuple[str, int, LayerLocation]] = {}
    for model in models:
        for index, layer in enumerate(range(model.layers.numbers.start, model.layers.numbers.stop)):
            start, end = model.layers.offsets[index : index + 2]
            known.setdefault(layer, (model.layers.names[index], end - start, model.layer_locations[index]))
    count = len(one.head.manifest.layers)
    if missing := set(range(count)) - known.keys():
        raise NotFound(
            f"none of these checkpoints holds {layers_text(missing)} of round {one.head.round}",
            "add the checkpoints of the other stages, or use one of a node that holds the whole model",
        )
    offsets = [0]
    for layer in range(count):
        offsets.append(offsets[-1] + known[layer][1])
    layers = LayerLayout(tuple(known[layer][0] for layer in range(count)), tuple(offsets))
    return StoredModel(one.spec, one.head, layers, tuple(known[layer][2] for layer in range(count)))
