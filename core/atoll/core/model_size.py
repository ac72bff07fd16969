"""Size of a run's model: parameters, memory, disk, download. Estimates without torch.

Where a value is unknown, they are lower bounds, so that no node that could train is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.built_in_shape import FP32_BYTES, layer_table, resolve_shape
from atoll.core.errors import ModelTooLarge
from atoll.core.model_memory import built_in_memory_bytes, replica_memory_bytes
from atoll.core.model_spec import ModelSection
from atoll.core.run_spec import RunSpec
from atoll.core.units import bytes_text
from atoll.v1 import plan_pb2

STATE_BYTES = 2 * FP32_BYTES  # per parameter: anchor and outer momentum, in a checkpoint and as a download
_LEAST_VOCABULARY = 256


@dataclass(frozen=True)
class ModelSize:
    """The size of all layers of a model."""

    parameters: int
    largest_layer_bytes: int  # of memory, with its gradient
    training_bytes: int  # of memory, for all layers

    def share_that_fits(self, memory_bytes: int) -> float:
        """The share of the layers that this much memory can train, about; 1: all.

        Raises `ModelTooLarge` if none fits.
        """
        if self.largest_layer_bytes > memory_bytes:
            raise ModelTooLarge(
                f"the model is too large for this device: one layer needs about "
                f"{bytes_text(self.largest_layer_bytes)}, and training may use {bytes_text(memory_bytes)}",
                "use a larger device, or raise vram_fraction or memory_megabytes",
            )
        return min(1.0, memory_bytes / max(1, self.training_bytes))

    def checkpoint_bytes(self, share: float = 1.0) -> int:
        """Bytes on disk of a checkpoint of a share of the layers."""
        return int(STATE_BYTES * self.parameters * share)


def model_size(spec: RunSpec, layers: plan_pb2.LayerTable | None, *, cuda: bool = False) -> ModelSize | None:
    """Compute the size from the run's layer table, or from the spec alone. None if only a trainer can determine it.

    Raises `UnsupportedModel`.
    """
    samples = spec.optimizer.micro_batch_samples
    if isinstance(spec.model, ModelSection):
        shape = resolve_shape(spec.model, spec.model.vocabulary or _LEAST_VOCABULARY)
        table = layers or layer_table(spec, shape)
        return _size(table, built_in_memory_bytes(spec, shape, samples, cuda=cuda))
    return _size(layers, replica_memory_bytes(layers, spec, samples)) if layers is not None else None


def _size(table: plan_pb2.LayerTable, training_bytes: int) -> ModelSize:
    own = {row.name: row.parameters for row in table.layers}
    return ModelSize(
        parameters=sum(own.values()),
        largest_layer_bytes=max(
            FP32_BYTES * (2 * (row.parameters + sum(own[name] for name in row.tied_to)) + row.frozen_parameters)
            for row in table.layers
        ),
        training_bytes=training_bytes,
    )
