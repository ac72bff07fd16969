"""Memory of document masks: numbers that say which token of a sample attends to which. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.model_spec import HuggingFaceModel
from atoll.core.run_spec import RunSpec


@dataclass(frozen=True)
class MaskMemory:
    """Bytes of the masks of one micro-batch, while a span computes it."""

    once: int = 0  # that all blocks share
    per_block: int = 0  # that each block keeps until backward

    def of(self, blocks: int) -> int:
        """Bytes in a span of so many blocks."""
        return self.once + blocks * self.per_block if blocks else 0


NO_MASKS = MaskMemory()


def mask_memory(spec: RunSpec, samples: int) -> MaskMemory:
    """Compute it for `samples` at once; nothing if the run has no document masks.

    The built-in decoder's blocks share one matrix [T,T] a sample. A Hugging Face decoder's share one of booleans, of
    which torch makes one of numbers in every block.
    """
    if not spec.data.document_masks:
        return NO_MASKS
    pairs = samples * spec.data.sequence_length**2
    numbers = pairs * (4 if spec.optimizer.precision == "fp32" else 2)
    return MaskMemory(pairs, numbers) if isinstance(spec.model, HuggingFaceModel) else MaskMemory(numbers)
