"""The weights with which a fork begins: a checkpoint of another run on this node's disk. These functions block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from atoll.core.errors import CheckpointCorrupt, DataDirUnusable
from atoll.core.run_spec import ForkSection
from atoll.node.state.checkpoint import ScannedCheckpoint, read_anchor_into, scan_checkpoint
from atoll.node.state.checkpoint_files import MANIFEST
from atoll.node.state.former_checkpoints import checkpoint_directory
from atoll.node.state.tensor_file import LayerLayout
from atoll.v1 import membership_pb2 as mb


@dataclass(frozen=True)
class ForkAnchor:
    """The state of the source round: fp32 [E] of all layers, which match the manifest, and the manifest's payload."""

    anchor_E: Tensor
    manifest: bytes


@dataclass(frozen=True)
class Refusal:
    """Why this node cannot write the genesis of a fork, with a sentence for people."""

    why: mb.ForkRefusal
    detail: str


def read_fork_anchor(
    runs: Path, fork: ForkSection, layers: LayerLayout, allocate: Callable[[], Tensor]
) -> ForkAnchor | Refusal:
    """Read the source round from the directory of this node's runs, and check every byte.

    `layers`: the new run's layers. Checks the whole checkpoint first, a chunk at a time. Then reads the anchor into the
    vector, fp32 [E], that `allocate` creates.
    """
    directory = checkpoint_directory(runs, fork.run, fork.round)
    name = str(directory.relative_to(runs))  # the path of this machine is not sent
    if not (directory / MANIFEST).is_file():
        told = f"there is no checkpoint {name}; the node keeps `checkpoint_keep` of them"
        return Refusal(mb.FORK_REFUSAL_MISSING, told)
    try:
        found = scan_checkpoint(directory)
        unfit = _unfit(found, fork, layers, name)
        if unfit is not None:
            return unfit
        anchor_E = allocate()
        read_anchor_into(directory, found, anchor_E)
    except CheckpointCorrupt as error:
        return Refusal(mb.FORK_REFUSAL_DAMAGED, str(error).replace(str(directory), name))
    except (DataDirUnusable, OSError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError if out of memory
        return resources_refusal(error, runs)
    return ForkAnchor(anchor_E, found.head.committed.payload)


def resources_refusal(error: BaseException, runs: Path) -> Refusal:
    """The refusal of a node that lacks memory or disk for this genesis. The text does not contain the path `runs`."""
    said = (str(error).splitlines() or [""])[0].replace(str(runs), "runs")
    return Refusal(mb.FORK_REFUSAL_RESOURCES, f"{type(error).__name__}: {said}" if said else type(error).__name__)


def _unfit(found: ScannedCheckpoint, fork: ForkSection, layers: LayerLayout, name: str) -> Refusal | None:
    """Why the fork cannot begin with an undamaged checkpoint; None: it can."""
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
    return None


def _difference(source: LayerLayout, ours: LayerLayout) -> str:
    def size(layout: LayerLayout, number: int) -> int:
        return layout.offsets[number + 1] - layout.offsets[number]

    for number, (theirs, mine) in enumerate(zip(source.names, ours.names, strict=False)):
        if (theirs, size(source, number)) != (mine, size(ours, number)):
            return f"{theirs} has {size(source, number)} parameters there, {mine} has {size(ours, number)} here"
    return f"{len(source.names)} layers there, {len(ours.names)} here"
