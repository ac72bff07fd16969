"""The committed state of a run on this node: anchor and outer momentum, and the staged result of the next round.

The vectors contain only the layers of this node's span. All other layer and element numbers in this module refer to the
whole model. The trainer shares the anchor's memory, so call `commit` only between two orders to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.fragments import Fragment
from atoll.core.manifest import Head
from atoll.node.state.outer_step import layer_state, layer_states, outer_step
from atoll.node.state.pieces import Kind
from atoll.v1 import manifest_pb2

LayerMap = Callable[[Callable[[int], manifest_pb2.LayerState], Iterable[int]], Iterator[manifest_pb2.LayerState]]


@dataclass(frozen=True)
class Staged:
    """A fragment's new state after a round, from element `start` on. It is kept separate until the round commits."""

    start: int
    anchor_E: Tensor
    momentum_E: Tensor
    layers: tuple[manifest_pb2.LayerState, ...]  # of the whole model, after the commit


@dataclass(frozen=True)
class FetchedState:
    """The state of `head`, fetched from other nodes; every layer matches its digest."""

    head: Head
    anchor_E: Tensor
    momentum_E: Tensor


class OuterStepBuilder:
    """Computes the outer step of one fragment, part by part as the average arrives.

    Does not change the current state.
    """

    def __init__(self, state: AnchorState, fragment: Fragment, learning_rate: float, momentum: float) -> None:
        self._fragment = fragment
        self._offsets = state.offsets
        own = state.slice(fragment.start, fragment.end)
        self._before = state.anchor_E[own], state.momentum_E[own]
        self._schedule = learning_rate, momentum
        self._made = torch.empty(fragment.elements), torch.empty(fragment.elements)

    def take(self, start: int, average_P: Tensor) -> None:
        """Compute the step of the fragment's elements from `start` on.

        A second call for the same part replaces the first result.
        """
        part = slice(start, start + len(average_P))
        anchor_E, momentum_E = self._before
        anchor_P, momentum_P = (vector_E[part] for vector_E in self._made)
        outer_step(anchor_E[part], momentum_E[part], average_P, *self._schedule, (anchor_P, momentum_P))

    def finish(self, before: Head, each: LayerMap = map) -> Staged:
        """Return the staged result with the layer digests of a commit after `before`.

        Call `take` for every element first. `each` maps over the layers; an executor's `map` hashes them in parallel.
        """

        def layer(number: int) -> manifest_pb2.LayerState:
            start, end = (offset - self._fragment.start for offset in self._offsets[number : number + 2])
            anchor_E, momentum_E = self._made
            return layer_state(number, anchor_E[start:end], momentum_E[start:end], before.round + 1)

        layers = list(before.manifest.layers)
        layers[self._fragment.first_layer : self._fragment.end_layer] = each(layer, self._fragment.layers)
        return Staged(self._fragment.start, *self._made, tuple(layers))


class AnchorState:
    """Anchor and momentum of one committed round, fp32 [E], for the layers that this node holds."""

    def __init__(
        self,
        anchor_E: Tensor,
        offsets: Sequence[int],
        layers: range | None = None,
        momentum_E: Tensor | None = None,
    ) -> None:
        """Wrap the vectors of `layers` (default: all). `offsets` has the element offsets of all layers of the model.

        `momentum_E` defaults to zeros. Raises `ValueError` when `anchor_E` has another length than `layers`.
        """
        self.anchor_E = anchor_E
        self.momentum_E = torch.zeros_like(anchor_E) if momentum_E is None else momentum_E
        self.offsets = tuple(offsets)
        self.layers = layers if layers is not None else range(len(self.offsets) - 1)
        if anchor_E.numel() != self.end - self.start:
            raise ValueError(
                f"the anchor has {anchor_E.numel()} elements; layers {self.layers} have {self.end - self.start}"
            )

    @property
    def is_whole(self) -> bool:
        """Whether this state has all layers of the model."""
        return len(self.layers) == len(self.offsets) - 1

    @property
    def start(self) -> int:
        """The first element, counted in the model."""
        return self.offsets[self.layers.start]

    @property
    def end(self) -> int:
        """One past the last element, counted in the model."""
        return self.offsets[self.layers.stop]

    def slice(self, start: int, end: int) -> slice:
        """Translate the model's elements [start, end) into a slice of this state's vectors."""
        return slice(start - self.start, end - self.start)

    def copy_layers(self, other: AnchorState, layers: Iterable[int]) -> None:
        """Copy `layers` from `other`; both states must hold them."""
        for layer in layers:
            start, end = self.offsets[layer : layer + 2]
            ours, theirs = self.slice(start, end), other.slice(start, end)
            self.anchor_E[ours].copy_(other.anchor_E[theirs])
            self.momentum_E[ours].copy_(other.momentum_E[theirs])

    def layer_states(self, round_number: int) -> tuple[manifest_pb2.LayerState, ...]:
        """Digests of the current vectors; only for a state of the whole model."""
        return layer_states(self.anchor_E, self.momentum_E, self.offsets, round_number)

    def staging(self, fragment: Fragment, learning_rate: float, momentum: float) -> OuterStepBuilder:
        """Begin an outer step of `fragment`; the current state stays as it is."""
        return OuterStepBuilder(self, fragment, learning_rate, momentum)

    def commit(self, staged: Staged) -> None:
        """Copy the staged fragment into this state."""
        own = self.slice(staged.start, staged.start + len(staged.anchor_E))
        self.anchor_E[own].copy_(staged.anchor_E)
        if len(staged.momentum_E) == len(self.momentum_E):
            self.momentum_E = staged.momentum_E
        else:
            self.momentum_E[own].copy_(staged.momentum_E)

    def vector(self, kind: Kind) -> Tensor:
        """The anchor or the outer momentum."""
        return self.anchor_E if kind == "anchor" else self.momentum_E

    def load_fetched(self, fetched: FetchedState) -> None:
        """Replace the values of all held layers by fetched ones."""
        self.anchor_E.copy_(fetched.anchor_E)
        self.momentum_E = fetched.momentum_E
