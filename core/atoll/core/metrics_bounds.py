"""How far a node's metrics may run ahead of the rounds that the coordinator knows."""

from __future__ import annotations

EARLY_METRICS_ROUNDS = 16  # all members report a round while its opener does; the coordinator ignores later ones
