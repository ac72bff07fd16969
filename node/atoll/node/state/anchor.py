"""The committed state of a run on this node: anchor and outer momentum, and what the next round staged.

The anchor lives in memory that the trainer shares, so `commit` writes it only between two orders to the
trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.manifest import Head
from atoll.node.averaging.outer import layer_state, layer_states, outer_step
from atoll.v1 import manifest_pb2

Each = Callable[[Callable[[int], manifest_pb2.LayerState], Iterable[int]], Iterator[manifest_pb2.LayerState]]


@dataclass(frozen=True)
class Staged:
    """What a round would make of the state, kept apart until the round commits."""

    anchor_E: Tensor
    momentum_E: Tensor
    layers: tuple[manifest_pb2.LayerState, ...]


@dataclass(frozen=True)
class Fetched:
    """The state of `head` as others hold it, every layer checked against its digest."""

    head: Head
    anchor_E: Tensor
    momentum_E: Tensor


class Staging:
    """An outer step that is taken part by part, as the average comes, beside the state that it starts from."""

    def __init__(
        self, anchor_E: Tensor, momentum_E: Tensor, offsets: Sequence[int], learning_rate: float, momentum: float
    ) -> None:
        self._before = anchor_E, momentum_E
        self._offsets = offsets
        self._schedule = learning_rate, momentum
        self._made = torch.empty_like(anchor_E), torch.empty_like(momentum_E)

    def take(self, start: int, average_P: Tensor) -> None:
        """The step of the elements from `start` on. A later one for the same elements stands in its place."""
        part = slice(start, start + len(average_P))
        anchor_E, momentum_E = self._before
        anchor_P, momentum_P = (vector_E[part] for vector_E in self._made)
        outer_step(anchor_E[part], momentum_E[part], average_P, *self._schedule, (anchor_P, momentum_P))

    def finish(self, round_number: int, each: Each = map) -> Staged:
        """With the digests that a commit would have, once every element was stepped.

        `each` may do the layers side by side, as an executor's `map` does.
        """

        def layer(number: int) -> manifest_pb2.LayerState:
            own = slice(self._offsets[number], self._offsets[number + 1])
            anchor_E, momentum_E = self._made
            return layer_state(number, anchor_E[own], momentum_E[own], round_number)

        return Staged(*self._made, tuple(each(layer, range(len(self._offsets) - 1))))


class AnchorState:
    """Anchor and momentum of one committed round, fp32 [E]."""

    def __init__(self, anchor_E: Tensor, offsets: Sequence[int]) -> None:
        self.anchor_E = anchor_E
        self.momentum_E = torch.zeros_like(anchor_E)
        self.offsets = tuple(offsets)

    def layer_states(self, round_number: int) -> tuple[manifest_pb2.LayerState, ...]:
        """Digests of what stands now."""
        return layer_states(self.anchor_E, self.momentum_E, self.offsets, round_number)

    def staging(self, learning_rate: float, momentum: float) -> Staging:
        """The outer step beside the current state."""
        return Staging(self.anchor_E, self.momentum_E, self.offsets, learning_rate, momentum)

    def commit(self, staged: Staged) -> None:
        """The staged state becomes the state."""
        self.anchor_E.copy_(staged.anchor_E)
        self.momentum_E = staged.momentum_E

    def adopt(self, fetched: Fetched) -> None:
        """Take state that was fetched and checked."""
        self.anchor_E.copy_(fetched.anchor_E)
        self.momentum_E = fetched.momentum_E
