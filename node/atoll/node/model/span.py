"""Spans: the contiguous ranges of layers that nodes hold. Pure.

Layer 0 is the embedding, the last layer is the final norm with the head, and the blocks are between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.errors import InvalidRequest


@dataclass(frozen=True, order=True)
class Span:
    """The layers from `first` to `last`, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise InvalidRequest(f"layers {self.first} to {self.last} are not a span: it needs 0 <= first <= last")

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer <= self.last

    def __str__(self) -> str:
        return f"layers {self.first} to {self.last}"

    def check_within(self, layers: int) -> None:
        """Check that a model of `layers` layers contains this span. Raises `InvalidRequest`."""
        if self.last >= layers:
            raise InvalidRequest(f"the model has layers 0 to {layers - 1}; the span asks for {self}")
