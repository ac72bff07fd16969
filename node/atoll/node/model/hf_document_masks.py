"""Arguments that a Hugging Face decoder's body passes to its blocks for a sample of several documents.

The library masks documents where positions restart, in families whose body builds its masks with the library's common
functions. Other families ignore positions, or have blocks that carry a state past the end of a document.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from atoll.node.model.document_masks import attends, document_positions


class RecordingBlock(nn.Module):
    """Placeholder for a block: records its arguments other than the input, and returns the input."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, *_: object, **given: Any) -> Tensor:
        self.given = given
        return hidden_states


def gets_documents(given: dict[str, Any], starts_BT: Tensor) -> bool:
    """Return whether a block's arguments restrict attention to documents and restart positions in each document."""
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[2:] != (starts_BT.shape[1],) * 2:
        return False
    allowed = mask > -1.0 if mask.is_floating_point() else mask.bool()  # additive masks have very negative values
    across, own = allowed & ~attends(starts_BT), allowed.diagonal(dim1=2, dim2=3)
    return not bool(across.any()) and bool(own.all()) and _restarts(given, starts_BT)


def _restarts(given: dict[str, Any], starts_BT: Tensor) -> bool:
    """Return whether rotations, or else positions, are the same in every document as in the first."""
    positions_BT = document_positions(starts_BT)
    rotations = list(_tensors(given.get("position_embeddings")))
    if not rotations:
        positions = given.get("position_ids")
        return isinstance(positions, Tensor) and bool((positions == positions_BT).all())
    first, second = positions_BT[0] == 0, positions_BT[0] == 1
    return all(
        each.shape[1] == len(first)
        and bool((each[0, first] == each[0, 0]).all())
        and bool((each[0, second] == each[0, 1]).all())
        for each in rotations
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors [B,T,…] of nested tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
