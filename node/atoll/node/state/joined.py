"""The whole model from checkpoints of nodes that each held some of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from atoll.core.errors import CheckpointCorrupt, NotFound
from atoll.node.state.checkpoint import Checkpoint
from atoll.node.state.tensor_file import Layers


def join(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """All layers of one round. `checkpoints`, at least one, may overlap and come in any order.

    Raises `CheckpointCorrupt` when they are of different rounds, and `NotFound` that names layers that none holds.
    """
    whole = checkpoints[0]
    if any(item.head.hash != whole.head.hash for item in checkpoints):
        rounds = ", ".join(str(item.head.round) for item in checkpoints)
        raise CheckpointCorrupt(f"these checkpoints are not of one round: {rounds}", "choose one with --round")
    count = len(whole.head.manifest.layers)
    whole = checkpoints[0] if len(whole.layers.names) == count else _nothing(whole)
    for item in sorted(checkpoints, key=lambda item: item.layers.first):
        whole = _longer(whole, item)
    if len(whole.layers.names) < count:
        missing = len(whole.layers.names)
        raise NotFound(
            f"none of these checkpoints holds layer {missing} of round {whole.head.round}",
            "name those of all stages of a route, or of a node that holds the whole model",
        )
    return whole


def _nothing(like: Checkpoint) -> Checkpoint:
    empty = torch.zeros(0)
    return replace(like, layers=Layers((), (0,)), anchor_E=empty, momentum_E=empty)


def _longer(whole: Checkpoint, item: Checkpoint) -> Checkpoint:
    """`whole`, which begins with layer 0, and what `item` holds of the layers right after it."""
    held, more = whole.layers, item.layers
    skip = len(held.names) - more.first
    if not 0 <= skip < len(more.names):
        return whole
    start = more.offsets[skip]
    offsets = tuple(offset - start + held.elements for offset in more.offsets[skip + 1 :])
    return replace(
        whole,
        layers=Layers((*held.names, *more.names[skip:]), (*held.offsets, *offsets)),
        anchor_E=torch.cat([whole.anchor_E, item.anchor_E[start:]]),
        momentum_E=torch.cat([whole.momentum_E, item.momentum_E[start:]]),
    )
