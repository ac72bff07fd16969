"""The committed state of a run on this node: anchor and outer momentum, and what the next round staged.

The anchor lives in memory that the trainer shares, so `commit` writes it only between two orders to the
trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.manifest import Head
from atoll.node.averaging.outer import layer_states, outer_step
from atoll.v1 import manifest_pb2


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

    def stage(self, average_E: Tensor, learning_rate: float, momentum: float, round_number: int) -> Staged:
        """The outer step beside the current state, with the digests that a commit would have. Pure."""
        vectors = outer_step(self.anchor_E, self.momentum_E, average_E, learning_rate, momentum)
        return Staged(*vectors, layer_states(*vectors, self.offsets, round_number))

    def commit(self, staged: Staged) -> None:
        """The staged state becomes the state."""
        self.anchor_E.copy_(staged.anchor_E)
        self.momentum_E = staged.momentum_E

    def adopt(self, fetched: Fetched) -> None:
        """Take state that was fetched and checked."""
        self.anchor_E.copy_(fetched.anchor_E)
        self.momentum_E = fetched.momentum_E
