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


class AnchorState:
    """Anchor and momentum of one committed round, fp32 [E]."""

    def __init__(self, anchor_E: Tensor, offsets: Sequence[int]) -> None:
        self.anchor_E = anchor_E
        self.momentum_E = torch.zeros_like(anchor_E)
        self.offsets = tuple(offsets)

    def layer_states(self, round_number: int) -> tuple[manifest_pb2.LayerState, ...]:
        """Digests of what stands now."""
        return layer_states(self.anchor_E, self.momentum_E, self.offsets, round_number)

    def stage(
        self, average_E: Tensor, learning_rate: float, momentum: float, round_number: int, each: Each = map
    ) -> Staged:
        """The outer step beside the current state, with the digests that a commit would have. Pure.

        `each` may do the layers side by side, as an executor's `map` does.
        """
        anchor_E, momentum_E = torch.empty_like(self.anchor_E), torch.empty_like(self.momentum_E)

        def step(layer: int) -> manifest_pb2.LayerState:
            own = slice(self.offsets[layer], self.offsets[layer + 1])
            made = anchor_E[own], momentum_E[own]
            outer_step(self.anchor_E[own], self.momentum_E[own], average_E[own], learning_rate, momentum, made)
            return layer_state(layer, *made, round_number)

        return Staged(anchor_E, momentum_E, tuple(each(step, range(len(self.offsets) - 1))))

    def commit(self, staged: Staged) -> None:
        """The staged state becomes the state."""
        self.anchor_E.copy_(staged.anchor_E)
        self.momentum_E = staged.momentum_E

    def adopt(self, fetched: Fetched) -> None:
        """Take state that was fetched and checked."""
        self.anchor_E.copy_(fetched.anchor_E)
        self.momentum_E = fetched.momentum_E
