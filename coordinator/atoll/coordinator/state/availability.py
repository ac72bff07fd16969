"""How much of the time a node is there, and how often it is lost: what the planner may count on. Pure.

Sums of seconds that fade with a half-life of a week, so that a node can become better. Who is new counts as always
there: a day of that is lent to everybody. An absence counts as a day at most. What happens while the coordinator is
down nobody knows, and it does not count.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.state.snapshot import LiveNode
from atoll.coordinator.store.records import Node

HALF_LIFE_SECONDS = 7 * 86400.0
PRIOR_UPTIME_SECONDS = 86400.0
MAX_COUNTED_ABSENCE_SECONDS = 86400.0
_HOUR = 3600.0


def came(node: Node, before: LiveNode | None, now: float) -> Node:
    """With the absence, or the older stream, that is over now. `now`: monotonic, as are the times in `before`."""
    if before is None:
        return node
    if before.connected:
        return went(node, before, now)
    away = min(max(0.0, now - before.seen), MAX_COUNTED_ABSENCE_SECONDS)
    faded = _decayed(node, away)
    return replace(faded, away_seconds=faded.away_seconds + away)


def went(node: Node, live: LiveNode, now: float) -> Node:
    """With the stream that is over now."""
    there = max(0.0, now - live.came)
    faded = _decayed(node, there)
    return replace(faded, there_seconds=faded.there_seconds + there)


def lost(node: Node, live: LiveNode) -> Node:
    """It was gone for too long, and had not said goodbye; since our start, else each start would count it again."""
    return replace(node, losses=node.losses + 1) if live.came else node


def availability(node: Node, live: LiveNode | None, now: float) -> float:
    """Share of the time that it is there, above 0."""
    there = node.there_seconds + _current_stream_seconds(live, now) + PRIOR_UPTIME_SECONDS
    return there / (there + node.away_seconds)


def failures_per_hour(node: Node, live: LiveNode | None, now: float) -> float:
    """That it is lost, while it is there."""
    return node.losses * _HOUR / (node.there_seconds + _current_stream_seconds(live, now) + PRIOR_UPTIME_SECONDS)


def _current_stream_seconds(live: LiveNode | None, now: float) -> float:
    return max(0.0, now - live.came) if live is not None and live.connected else 0.0


def _decayed(node: Node, seconds: float) -> Node:
    kept = 0.5 ** (seconds / HALF_LIFE_SECONDS)
    return replace(
        node,
        there_seconds=kept * node.there_seconds,
        away_seconds=kept * node.away_seconds,
        losses=kept * node.losses,
    )
