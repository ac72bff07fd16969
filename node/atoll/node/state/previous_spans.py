"""Layers that this node held under earlier plans, or before it was started again, until nobody can need them.

Others may know them from nobody else, and a later plan may give them back.
"""

from __future__ import annotations

from atoll.core.manifest import Head
from atoll.node.state.anchor import AnchorState


class PreviousSpans:
    """States that are whole for the layers that they hold, each with its head; newest last."""

    def __init__(self) -> None:
        self.held: tuple[tuple[Head, AnchorState], ...] = ()

    def add(self, head: Head, state: AnchorState) -> None:
        """What was held until now; nobody changes it any more."""
        self.held = (*self.held, (head, state))

    def fill(self, state: AnchorState, head: Head | None) -> frozenset[int]:
        """Copy what is true of `head` into a state that still lacks all its layers; the layers that it lacks then."""
        missing = set(state.layers)
        for then, former in reversed(self.held if head is not None else ()):
            true = unchanged_layers(then, head, missing & set(former.layers))
            state.copy_layers(former, sorted(true))
            missing -= true
        return frozenset(missing)

    def prune(self, head: Head, held: range) -> None:
        """We hold these layers of `head`. What was averaged since by those who hold it now, nobody needs from us."""
        self.held = tuple(
            (then, former) for then, former in self.held if unchanged_layers(then, head, set(former.layers) - set(held))
        )


def unchanged_layers(then: Head, now: Head | None, layers: set[int]) -> set[int]:
    """Of these layers, those that are at `now` as they were at `then`."""
    if now is None:
        return set()
    return {layer for layer in layers if then.manifest.layers[layer] == now.manifest.layers[layer]}
