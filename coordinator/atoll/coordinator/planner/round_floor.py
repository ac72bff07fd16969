"""How long an outer round would take with one route changed, from the levels of a layout close by. Pure.

An exchange's levels depend on all holders of a layer and move little when one of many changes; a search over large
swarms learns them from time to time and compares routes by what they would keep their own links busy.
"""

from __future__ import annotations

import numpy as np

from atoll.coordinator.planner.cost import Evaluation, layer_holders, link_seconds, round_latency
from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.exchange_time import busy_seconds, finish_seconds_per_byte, largest_shares, reducer_mask
from atoll.coordinator.planner.problem import Stage
from atoll.coordinator.planner.splits import Split


class RouteRoundTime:
    """The least time of a round by route, as it was when `known` was evaluated."""

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
        """Until the last link of this route is done with exchange and activations."""
        found = self._seen.get(id(split))
        if found is None:
            seconds = max(self._stage(stage, split.rate) for stage in split.route) + self._latency
            found = self._seen[id(split)] = split, seconds  # the split is kept so that its id is not used again
        return found[1]

    def _stage(self, stage: Stage, rate: float) -> float:
        tables, span = self._tables, slice(stage.first, stage.last + 1)
        level, largest = self._level[span], self._most[span]
        reduces = np.full(level.shape, tables.dialable[stage.machine])
        per_byte = busy_seconds(
            level, np.full(level.shape, tables.link_bytes_per_second[stage.machine]), reduces, largest, self._routes
        )
        own = self._interval * rate * link_seconds(tables, stage.machine, stage.first, stage.last + 1)
        return float((per_byte * tables.layer_bytes[span]).sum()) + own
