"""What the first device of a stage tells the others to do now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankOrder:
    """To followers: their part of what a stage of a route does now. Without an answer, like `Step`."""

    method: str  # a method of `ShardedStage`
    micro_batch: int = 0
    rows: int = 0  # samples of the micro-batch
    micro_batches: int = 0
    factor: float | None = None  # of `step`
