"""Spans, the contiguous ranges of layers that nodes hold, and the check that spans form a route. Pure.

Layer 0 is the embedding, the last layer is the final norm with the head, and the blocks are between them.
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


def equal_cuts(layers: int, stages: int) -> tuple[Span, ...]:
    """Split `layers` into `stages` spans whose lengths differ by at most one, shorter spans first.

    Raises `InvalidRequest`.
    """
    if not 1 <= stages <= layers:
        raise InvalidRequest(f"{layers} layers cannot be split into {stages} spans: it needs 1 to {layers}")
    edges = [layers * stage // stages for stage in range(stages + 1)]
    return tuple(Span(first, end - 1) for first, end in pairwise(edges))


def check_route(spans: Sequence[Span], layers: int) -> None:
    """Check that the spans, in this order, cover every layer exactly once. Raises `InvalidRequest`."""
    expected = 0
    for span in spans:
        if span.first != expected:
            what = "are missing" if span.first > expected else "come twice"
            low, high = sorted((span.first, expected))
            raise InvalidRequest(f"invalid route at {span}: layers {low} to {high - 1} {what}")
        expected = span.last + 1
    if expected != layers:
        raise InvalidRequest(f"the route ends after layer {expected - 1}; the model's last layer is {layers - 1}")
