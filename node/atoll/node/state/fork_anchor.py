"""The weights with which a fork begins: a checkpoint of another run on this node's disk. Functions here block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from atoll.core.errors import AtollError
from atoll.core.run_spec import ForkSection
from atoll.node.state.checkpoint import read_anchor
from atoll.node.state.checkpoint_files import MANIFEST
from atoll.node.state.former_checkpoints import checkpoint_directory
from atoll.node.state.tensor_file import LayerLayout
from atoll.v1 import membership_pb2 as mb


@dataclass(frozen=True)
class ForkAnchor:
    """The source round: fp32 [E] of all layers, which match the manifest, and that manifest's payload."""

    anchor_E: Tensor
    manifest: bytes


@dataclass(frozen=True)
class Refusal:
    """Why this node cannot write the genesis of a fork, with one sentence for people."""

    why: mb.ForkRefusal
    detail: str


def read_fork_anchor(runs: Path, fork: ForkSection, layers: LayerLayout) -> ForkAnchor | Refusal:
    """Read the source round from the directory of this node's runs, and check every byte. `layers`: of the new run."""
    directory = checkpoint_directory(runs, fork.run, fork.round)
    name = directory.relative_to(runs)  # no path of this machine leaves it
    if not (directory / MANIFEST).is_file():
        told = f"there is no checkpoint {name}; the node keeps `checkpoint_keep` of them"
        return Refusal(mb.FORK_REFUSAL_MISSING, told)
    try:
        found = read_anchor(directory)
    except AtollError as error:
        return Refusal(mb.FORK_REFUSAL_DAMAGED, str(error).replace(str(directory), str(name)))
    if found.head.hash.hex() != fork.manifest:
        told = f"{name} has manifest {found.head.hash.hex()}; the run begins with {fork.manifest}"
        return Refusal(mb.FORK_REFUSAL_OTHER_MANIFEST, told)
    if len(found.layers.names) != len(found.head.manifest.layers):
        last = found.layers.first + len(found.layers.names) - 1
        of_all = f"{len(found.head.manifest.layers)}: {name}"
        return Refusal(mb.FORK_REFUSAL_SOME_LAYERS, f"it has layers {found.layers.first}-{last} of {of_all}")
    if found.layers != layers:
        told = f"the vocabulary or [model] of the new run differs: {_difference(found.layers, layers)}"
        return Refusal(mb.FORK_REFUSAL_OTHER_LAYERS, told)
    return ForkAnchor(found.anchor_E, found.head.committed.payload)


def _difference(source: LayerLayout, ours: LayerLayout) -> str:
    def size(layout: LayerLayout, number: int) -> int:
        return layout.offsets[number + 1] - layout.offsets[number]

    for number, (theirs, mine) in enumerate(zip(source.names, ours.names, strict=False)):
        if (theirs, size(source, number)) != (mine, size(ours, number)):
            return f"{theirs} has {size(source, number)} parameters there, {mine} has {size(ours, number)} here"
    return f"{len(source.names)} layers there, {len(ours.names)} here"
