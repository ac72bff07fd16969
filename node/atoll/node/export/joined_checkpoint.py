"""The whole model, joined from checkpoints of nodes that each hold some layers."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.errors import CheckpointCorrupt, NotFound
from atoll.core.units import layers_text
from atoll.node.export.stored_model import LayerLocation, StoredModel
from atoll.node.state.tensor_file import LayerLayout


def join(models: Sequence[StoredModel]) -> StoredModel:
    """Join checkpoints of one round to all layers of the model, without reading tensors.

    `models` has at least one entry; they may overlap and be in any order. Raises `CheckpointCorrupt` if they are of
    different rounds, and `NotFound` with the layers that no checkpoint holds.
    """
    one = models[0]
    if any(item.head.hash != one.head.hash for item in models):
        rounds = ", ".join(str(item.head.round) for item in models)
        raise CheckpointCorrupt(
            f"these checkpoints are not of one round, but of {rounds}", "choose one round with --round"
        )
    known: dict[int, tuple[str, int, LayerLocation]] = {}
    for model in models:
        for place, layer in enumerate(range(model.layers.numbers.start, model.layers.numbers.stop)):
            start, end = model.layers.offsets[place : place + 2]
            known.setdefault(layer, (model.layers.names[place], end - start, model.layer_locations[place]))
    count = len(one.head.manifest.layers)
    if missing := set(range(count)) - known.keys():
        raise NotFound(
            f"none of these checkpoints holds {layers_text(missing)} of round {one.head.round}",
            "add the checkpoints of the other stages, or use one of a node that holds the whole model",
        )
    offsets = [0]
    for layer in range(count):
        offsets.append(offsets[-1] + known[layer][1])
    names, layer_locations = (
        tuple(known[layer][0] for layer in range(count)),
        tuple(known[layer][2] for layer in range(count)),
    )
    return StoredModel(one.spec, one.head, LayerLayout(names, tuple(offsets)), layer_locations)
