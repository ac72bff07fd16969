"""Order of rank 0 to the other ranks of a stage: one call of a `ShardedStage` method. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankOrder:
    """An order of rank 0 to the other ranks: call this method of the stage now. It has no answer, like `Step`."""

    method: str  # of `ShardedStage`
    arguments: tuple[object, ...] = ()  # numbers, and None in place of tensors, which only rank 0 has
