"""Order of rank 0 to the other ranks of a stage: one call of a `ShardedStage` method. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankOrder:
    """Rank 0 to ranks: run this operation of the stage on your device now. It has no answer, like `Step`."""

    method: str  # a key of `ShardedStage.run_order`
    micro_batch: int = 0
    rows: int = 0  # samples of the micro-batch
    micro_batches: int = 0
    factor: float | None = None  # argument of `step`
