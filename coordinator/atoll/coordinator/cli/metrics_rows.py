"""Rows of `atollctl metrics`: read page by page, and the name and unit of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atoll.coordinator.cli.client import Client
from atoll.coordinator.sanitize import MAX_NAME_CHARACTERS, clean
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import membership_pb2 as mb

PAGE_ROWS = 2000
UNITS = {  # of each value, in the order of columns; empty: a number without a unit
    "train_loss": "nats/token",
    "validation_loss": "nats/token",
    "learning_rate": "",
    "tokens": "tokens",
    "tokens_per_second": "tokens/s",
    "update_norm": "",
    "seconds": "s",
    "compute_seconds": "s",
    "stall_seconds": "s",
    "exchange_seconds": "s",
    "bytes_sent": "bytes",
    "bytes_received": "bytes",
}
Value = float | None


@dataclass(frozen=True)
class Row:
    """One node's metrics of one round. `values` has each key of `UNITS`; None: not measured."""

    round: int
    node: str
    peer_id: str
    unix_ms: int
    values: Mapping[str, Value]

    def document(self) -> dict[str, object]:
        """Return the row as one flat object."""
        place = {"round": self.round, "node": self.node, "peer_id": self.peer_id, "unix_ms": self.unix_ms}
        return {**place, **self.values}


@dataclass(frozen=True)
class Wanted:
    """Selection of rows of a run."""

    run_id: str
    node: str
    since_round: int


def newest_rows(client: Client, wanted: Wanted, limit: int, held_out: Mapping[int, float]) -> list[Row]:
    """The newest rows, oldest first."""
    request = wire.ListMetricsRequest(
        run_id=wanted.run_id, node=wanted.node, since_round=wanted.since_round, limit=limit, newest=True
    )
    return [_row(item, held_out) for item in client.call(client.stub.ListMetrics, request).rows]


def all_rows(client: Client, wanted: Wanted, held_out: Mapping[int, float]) -> Iterator[Row]:
    """All rows, oldest first, one page in memory at a time. `held_out`: the run's losses by round."""
    request = wire.ListMetricsRequest(
        run_id=wanted.run_id, node=wanted.node, since_round=wanted.since_round, limit=PAGE_ROWS
    )
    while True:
        rows = client.call(client.stub.ListMetrics, request).rows
        yield from (_row(item, held_out) for item in rows)
        if len(rows) < PAGE_ROWS:
            return
        request.since_round, request.after_peer_id = rows[-1].metrics.round, rows[-1].peer_id


def _row(item: wire.MetricsRow, held_out: Mapping[int, float]) -> Row:
    metrics = item.metrics
    return Row(
        round=metrics.round,
        node=clean(item.name, MAX_NAME_CHARACTERS) or clean(item.peer_id, MAX_NAME_CHARACTERS),
        peer_id=clean(item.peer_id, MAX_NAME_CHARACTERS),
        unix_ms=item.unix_ms,
        values=_values(metrics, held_out.get(metrics.round)),
    )


def _values(metrics: mb.NodeMetrics, validation_loss: float | None) -> dict[str, Value]:
    return {
        "train_loss": metrics.train_loss or None,
        "validation_loss": validation_loss,
        "learning_rate": metrics.learning_rate or None,
        "tokens": metrics.tokens,
        "tokens_per_second": metrics.tokens / metrics.seconds if metrics.seconds else None,
        "update_norm": metrics.update_norm or None,
        "seconds": metrics.seconds,
        "compute_seconds": metrics.compute_seconds,
        "stall_seconds": metrics.stall_seconds,
        "exchange_seconds": metrics.exchange_seconds,
        "bytes_sent": metrics.bytes_sent,
        "bytes_received": metrics.bytes_received,
    }
