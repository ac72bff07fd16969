"""How far a node's metrics may run ahead of the rounds that the coordinator knows."""

from __future__ import annotations

EARLY_METRICS_ROUNDS = 16  # members report a round when its opener does; the coordinator ignores rounds further ahead
