"""Memory of document masks, the same for nodes and plans. A mask says which tokens of a sample attend to each other.

With grouped-query attention, every block also repeats its keys and values for all heads, because no fused kernel
accepts both a mask and fewer key heads. Nodes know a block's heads, and write these bytes into the layer table. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from atoll.core.model_spec import HuggingFaceModel
from atoll.core.run_spec import RunSpec


@dataclass(frozen=True)
class MaskMemory:
    """Bytes of the masks of one micro-batch while a span computes it."""

    once: int = 0  # shared by all blocks
    per_block: int = 0  # kept by each block until backward

    def of(self, blocks: int) -> int:
        """Bytes in a span of `blocks` blocks."""
        return self.once + blocks * self.per_block if blocks else 0


NO_MASKS = MaskMemory()


class MaskedLayer(Protocol):
    """A row of a layer table, or a planner's copy of it."""

    @property
    def masked_bytes_per_token(self) -> int:
        """Bytes per token that it also keeps for backward with document masks; 0 if it is not a block."""
        ...


def repeated_bytes_per_token(spec: RunSpec, heads: int, kv_heads: int, head_dimension: int) -> int:
    """Bytes per token of the keys and values that a block repeats; 0 if the run has no document masks."""
    return 2 * _number_bytes(spec) * (heads - kv_heads) * head_dimension if spec.data.document_masks else 0


def mask_memory(spec: RunSpec, layers: Iterable[MaskedLayer], samples: int) -> MaskMemory:
    """Compute the memory of the masks for `samples` samples at once; zero if the run has no document masks.

    The blocks of the built-in decoder share one matrix [T,T] per sample. The blocks of a Hugging Face decoder share a
    boolean matrix, which torch converts to numbers in every block.
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
