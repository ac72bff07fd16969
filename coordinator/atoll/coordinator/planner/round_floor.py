"""Estimate of the outer round's time with one route changed, from the levels of a similar layout. Pure.

The levels of an exchange (`exchange_time.py`) depend on all holders of a layer. They change little when one of many
holders changes. So a search over a large swarm computes them from time to time, and compares routes by the time that
they would keep their own links busy.
"""

from __future__ import annotations

import numpy as np

from atoll.coordinator.planner.cost import Evaluation, layer_holders, link_seconds, round_latency
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.exchange_time import (
    finish_seconds_per_byte,
    largest_shares,
    link_seconds_per_byte,
    reducer_mask,
)
from atoll.coordinator.planner.problem import Stage
from atoll.coordinator.planner.splits import Split


class RouteRoundTime:
    """Least time of a round by route, with the exchange levels of the layout `known`."""

    def __init__(self, tables: CostTables, known: Evaluation) -> None:
        holders = layer_holders(tables, known.layout)
        reduces = reducer_mask(tables.dialable[holders])
        self._tables = tables
        self._level = finish_seconds_per_byte(tables.link_bytes_per_second[holders], reduces)
        self._most = largest_shares(reduces)[:, 0]
        self._routes = len(known.layout.routes)
        self._interval = known.round.interval_seconds
        self._latency = round_latency(tables, known.layout.machines)
        self._seen: dict[int, tuple[Split, float]] = {}

    def seconds(self, split: Split) -> float:
        """Seconds until the last link of this route is done with exchange and activations."""
        found = self._seen.get(id(split))
        if found is None:
            seconds = max(self._stage(stage, split.score_rate) for stage in split.route) + self._latency
            found = self._seen[id(split)] = split, seconds  # the reference keeps the id from being reused
        return found[1]

    def _stage(self, stage: Stage, rate: float) -> float:
        tables, span = self._tables, slice(stage.first, stage.last + 1)
        level, largest = self._level[span], self._most[span]
        reduces = np.full(level.shape, tables.dialable[stage.machine])
        per_byte = link_seconds_per_byte(
            level, np.full(level.shape, tables.link_bytes_per_second[stage.machine]), reduces, largest, self._routes
        )
        own = self._interval * rate * link_seconds(tables, stage.machine, stage.first, stage.last + 1)
        return float((per_byte * tables.layer_bytes[span]).sum()) + own
