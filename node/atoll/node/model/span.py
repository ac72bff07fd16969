"""Spans: the contiguous ranges of layers that nodes hold, and how a route is made of them. Pure.

Layer 0 is the embedding, the last one the final norm and the head; between them stand the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from atoll.core.errors import InvalidRequest


@dataclass(frozen=True, order=True)
class Span:
    """The layers from `first` to `last`, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise InvalidRequest(f"layers {self.first} to {self.last} are no span")

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer <= self.last

    def __str__(self) -> str:
        return f"layers {self.first} to {self.last}"

    def check_within(self, layers: int) -> None:
        """Raise `InvalidRequest` unless a model of so many layers has them all."""
        if self.last >= layers:
            raise InvalidRequest(f"the model has layers 0 to {layers - 1}, not {self}")


def equal_cuts(layers: int, stages: int) -> tuple[Span, ...]:
    """`layers` in `stages` spans whose lengths differ by one at most, the shorter ones first."""
    if not 1 <= stages <= layers:
        raise InvalidRequest(f"{layers} layers cannot be cut into {stages} spans")
    edges = [layers * stage // stages for stage in range(stages + 1)]
    return tuple(Span(first, end - 1) for first, end in pairwise(edges))


def check_route(spans: Sequence[Span], layers: int) -> None:
    """Raise `InvalidRequest` unless the spans, in this order, cover every layer exactly once."""
    expected = 0
    for span in spans:
        if span.first != expected:
            what = "are left out" if span.first > expected else "come twice"
            low, high = sorted((span.first, expected))
            raise InvalidRequest(f"a route goes on with {span}: layers {low} to {high - 1} {what}")
        expected = span.last + 1
    if expected != layers:
        raise InvalidRequest(f"a route ends after layer {expected - 1}; the model's last one is {layers - 1}")
