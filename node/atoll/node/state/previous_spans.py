"""Keep the layers that this node held under earlier plans or before a restart, until no node can need them.

This node may have the only copy of them, and a later plan may assign them to this node again.
"""

from __future__ import annotations

from atoll.core.manifest import Head
from atoll.node.state.anchor import AnchorState


class PreviousSpans:
    """Earlier states of this node with their heads, newest last; each is complete for its layers."""

    def __init__(self) -> None:
        self.held: tuple[tuple[Head, AnchorState], ...] = ()

    def add(self, head: Head, state: AnchorState) -> None:
        """Keep a state that was current until now. The caller must not change it any more."""
        self.held = (*self.held, (head, state))

    def fill(self, state: AnchorState, head: Head | None) -> frozenset[int]:
        """Copy the layers that have not changed up to `head` into a new `state`. Returns the layers still missing."""
        missing = set(state.layers)
        for previous_head, previous in reversed(self.held if head is not None else ()):
            unchanged = unchanged_layers(previous_head, head, missing & set(previous.layers))
            state.copy_layers(previous, sorted(unchanged))
            missing -= unchanged
        return frozenset(missing)

    def prune(self, head: Head, held: range) -> None:
        """Drop states without a useful layer, given that the current state has the layers `held` at `head`.

        A layer is useful when it is not in `held` and was not averaged since its state's head. Otherwise its current
        holders have a newer version.
        """
        self.held = tuple(
            (previous_head, previous)
            for previous_head, previous in self.held
            if unchanged_layers(previous_head, head, set(previous.layers) - set(held))
        )


def unchanged_layers(before: Head, now: Head | None, layers: set[int]) -> set[int]:
    """The layers of `layers` that are the same at `before` and `now`; none if `now` is None."""
    if now is None:
        return set()
    return {layer for layer in layers if before.manifest.layers[layer] == now.manifest.layers[layer]}
