"""The metrics that each node reports of a round: checked here, kept until the next tick, then stored together. Pure.

A node reports each round once. All members report at the same moment, so `store` writes their rows in one transaction,
at most `ROWS_A_TICK`. A database needs seconds for the rows that a hundred nodes collect during an outage. Unlike
rounds and losses, metrics are acknowledged before they are stored. A coordinator that is killed loses the metrics of
one tick.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

from atoll.coordinator.rounds.reports import drop, reject
from atoll.coordinator.rounds.source_losses import MAX_LOSS
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.rate_limits import METRICS_RATE
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import NodeMetrics
from atoll.coordinator.store.retention import FULL_METRICS_ROUNDS
from atoll.core.errors import PeerMisbehaved
from atoll.core.metrics_bounds import EARLY_METRICS_ROUNDS
from atoll.v1 import membership_pb2 as mb

ROWS_A_TICK = 2000
MAX_MEASURE = 1e15  # largest value of seconds, norms and counts, so that sums and quotients stay finite
MIN_SECONDS = 1e-6  # of a round that was timed
_MEASURES = tuple(item.name for item in fields(NodeMetrics) if item.name not in (*NodeMetrics.KEY, "reported_ms"))


def take_metrics(draft: Draft, peer_id: str, run_id: str, report: mb.NodeMetrics) -> None:
    """Keep a node's metrics of a round until the next tick. Ignores rounds that are not kept in full any more."""
    head_round = draft.state.runs[run_id].head_round
    if not max(0, head_round - FULL_METRICS_ROUNDS) < report.round <= head_round + EARLY_METRICS_ROUNDS:
        return
    if report.round not in draft.state.live[peer_id].pending_metrics and not _charge(draft, peer_id):
        return  # a repeated report is not charged
    row = _row(draft, peer_id, run_id, report)
    try:
        _check(row)
    except PeerMisbehaved as error:
        reject(draft, run_id, peer_id, "metrics", error)
        return
    live = draft.state.live[peer_id]
    draft.set_live(peer_id, replace(live, pending_metrics={**live.pending_metrics, row.round: row}))


def _charge(draft: Draft, peer_id: str) -> bool:
    live = draft.state.live[peer_id]
    remaining = live.metrics_allowance.spend(METRICS_RATE, draft.now.monotonic)
    if remaining is None:
        drop(draft, peer_id)
        return False
    draft.set_live(peer_id, replace(live, metrics_allowance=remaining))
    return True


def store(state: State, now: StepTime) -> Step[None]:
    """Store the pending metrics of all nodes, up to the limit; the rest follows at the next tick."""
    draft, left, changed = Draft(state, now), ROWS_A_TICK, {}
    for peer_id, live in state.live.items():
        rows = list(live.pending_metrics.items())
        if not rows or not left:
            continue
        for _, row in rows[:left]:
            draft.log(row)
        changed[peer_id] = replace(live, pending_metrics=dict(rows[left:]))
        left -= min(left, len(rows))
    if changed:
        draft.set_many_live(changed)
    return draft.done(None)


def _row(draft: Draft, peer_id: str, run_id: str, report: mb.NodeMetrics) -> NodeMetrics:
    return NodeMetrics(
        run_id=run_id,
        round=report.round,
        peer_id=peer_id,
        reported_ms=draft.now.unix_ms,
        train_loss=report.train_loss,
        learning_rate=report.learning_rate,
        tokens=report.tokens,
        seconds=report.seconds,
        update_norm=report.update_norm,
        compute_seconds=report.compute_seconds,
        stall_seconds=report.stall_seconds,
        exchange_seconds=report.exchange_seconds,
        bytes_sent=report.bytes_sent,
        bytes_received=report.bytes_received,
    )


def _check(row: NodeMetrics) -> None:
    """Raise `PeerMisbehaved` for a value that is not finite, negative, or too large."""
    for name in _MEASURES:
        value, limit = getattr(row, name), MAX_LOSS if name == "train_loss" else MAX_MEASURE
        if not (math.isfinite(value) and 0 <= value <= limit):
            raise PeerMisbehaved(f"{name} of round {row.round} is {value}; must be finite, from 0 to {limit:g}")
    if 0 < row.seconds < MIN_SECONDS:
        raise PeerMisbehaved(f"seconds of round {row.round} are {row.seconds}; must be 0 or at least {MIN_SECONDS:g}")
