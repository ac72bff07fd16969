"""Availability of a node and its rate of losses, which the planner uses. Pure.

Both are sums of seconds that decay with a half-life of a week, so that a node can improve. A new node counts as always
available: every node is credited with one day of uptime. One absence counts as a day at most. Time in which the
coordinator is down does not count, because nothing is known about it.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.state.snapshot import LiveNode
from atoll.coordinator.store.records import Node

HALF_LIFE_SECONDS = 7 * 86400.0
PRIOR_UPTIME_SECONDS = 86400.0
MAX_COUNTED_ABSENCE_SECONDS = 86400.0
_HOUR = 3600.0


def count_absence(node: Node, before: LiveNode | None, now: float) -> Node:
    """Add the absence that ends now, or the older stream. `now` and the times in `before` are monotonic."""
    if before is None:
        return node
    if before.connected:
        return count_connected(node, before, now)
    away = min(max(0.0, now - before.last_message_at), MAX_COUNTED_ABSENCE_SECONDS)
    decayed = _decayed(node, away)
    return replace(decayed, away_seconds=decayed.away_seconds + away)


def count_connected(node: Node, live: LiveNode, now: float) -> Node:
    """Add the stream that ends now."""
    connected_seconds = max(0.0, now - live.connected_at)
    decayed = _decayed(node, connected_seconds)
    return replace(decayed, there_seconds=decayed.there_seconds + connected_seconds)


def count_loss(node: Node, live: LiveNode) -> Node:
    """Count a loss, unless the node has not connected since this process started: the loss was counted before."""
    return replace(node, losses=node.losses + 1) if live.connected_at else node


def availability(node: Node, live: LiveNode | None, now: float) -> float:
    """Share of the time in which the node is connected. Always above 0."""
    connected_seconds = node.there_seconds + _current_stream_seconds(live, now) + PRIOR_UPTIME_SECONDS
    return connected_seconds / (connected_seconds + node.away_seconds)


def failures_per_hour(node: Node, live: LiveNode | None, now: float) -> float:
    """Losses an hour of connected time."""
    return node.losses * _HOUR / (node.there_seconds + _current_stream_seconds(live, now) + PRIOR_UPTIME_SECONDS)


def _current_stream_seconds(live: LiveNode | None, now: float) -> float:
    return max(0.0, now - live.connected_at) if live is not None and live.connected else 0.0


def _decayed(node: Node, seconds: float) -> Node:
    factor = 0.5 ** (seconds / HALF_LIFE_SECONDS)
    return replace(
        node,
        there_seconds=factor * node.there_seconds,
        away_seconds=factor * node.away_seconds,
        losses=factor * node.losses,
    )
