"""Memory of document masks, the same for nodes and plans: numbers that say which token of a sample attends to which.

With grouped-query attention every block also repeats its keys and values for all heads: no fused kernel takes a mask
and fewer key heads. Nodes know a block's heads and write what it keeps into the layer table. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from atoll.core.model_spec import HuggingFaceModel
from atoll.core.run_spec import RunSpec


@dataclass(frozen=True)
class MaskMemory:
    """Bytes that masks take for one micro-batch, while a span computes it."""

    once: int = 0  # that all blocks share
    per_block: int = 0  # that each block keeps until backward

    def of(self, blocks: int) -> int:
        """Bytes in a span of so many blocks."""
        return self.once + blocks * self.per_block if blocks else 0


NO_MASKS = MaskMemory()


class MaskedLayer(Protocol):
    """A row of a layer table, or what a planner made of it."""

    @property
    def masked_bytes_per_token(self) -> int:
        """What it keeps for backward besides, in a run with document masks; 0 if it is no block."""
        ...


def repeated_bytes_per_token(spec: RunSpec, heads: int, kv_heads: int, head_dimension: int) -> int:
    """Count the keys and values that a block repeats for each token; none if the run has no document masks."""
    return 2 * _number_bytes(spec) * (heads - kv_heads) * head_dimension if spec.data.document_masks else 0


def mask_memory(spec: RunSpec, layers: Iterable[MaskedLayer], samples: int) -> MaskMemory:
    """Compute it for `samples` at once; nothing if the run has no document masks.

    The built-in decoder's blocks share one matrix [T,T] a sample. A Hugging Face decoder's share one of booleans, of
    which torch makes one of numbers in every block.
    """
    if not spec.data.document_masks:
        return NO_MASKS
    tokens = samples * spec.data.sequence_length
    pairs = tokens * spec.data.sequence_length
    numbers = pairs * _number_bytes(spec)
    kept = tokens * max((row.masked_bytes_per_token for row in layers), default=0)
    return MaskMemory(pairs, numbers + kept) if isinstance(spec.model, HuggingFaceModel) else MaskMemory(numbers, kept)


def _number_bytes(spec: RunSpec) -> int:
    return 4 if spec.optimizer.precision == "fp32" else 2
