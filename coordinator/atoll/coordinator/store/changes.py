"""Changes of rows as SQL, including the thinning of old rows (`retention.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from sqlalchemy import ColumnElement, Connection, Table, Update, bindparam, case, exists, func, select
from sqlalchemy.exc import IntegrityError

from atoll.coordinator.store import retention
from atoll.coordinator.store.database_lock import already_owned
from atoll.coordinator.store.records import (
    OF_RUN,
    Change,
    Checkpoint,
    Credit,
    Delete,
    DropMetrics,
    DropRun,
    Evaluation,
    Event,
    NodeMetrics,
    Record,
    Round,
    Thin,
)
from atoll.coordinator.store.tables import TABLES

_KEY_PREFIX = "key_"
_UPDATES: dict[type[Record], Update] = {  # built once, because building one takes longer than executing it
    record: table.update().where(*(table.c[name] == bindparam(_KEY_PREFIX + name) for name in record.KEY))
    for record, table in TABLES.items()
}


def has_checkpoint(table: Table, column: str) -> ColumnElement[bool]:
    held = TABLES[Checkpoint]
    return exists().where(held.c.run_id == table.c.run_id, held.c.round == table.c[column])


def _thin(connection: Connection, change: Thin) -> None:
    rounds, losses, metrics = TABLES[Round], TABLES[Evaluation], TABLES[NodeMetrics]
    ours = (rounds.c.run_id == change.run_id) & rounds.c.committed
    old = ours & (rounds.c.number <= change.head_round - retention.KEPT_MANIFESTS)
    connection.execute(rounds.update().where(old, func.length(rounds.c.manifest) > 0).values(manifest=b""))
    for table, column, where, full_rounds in (
        (rounds, "number", ours, retention.FULL_ROUNDS),
        (losses, "round", losses.c.run_id == change.run_id, retention.FULL_ROUNDS),
        (metrics, "round", metrics.c.run_id == change.run_id, retention.FULL_METRICS_ROUNDS),
    ):
        for newest, bucket in retention.thinning(change.head_round, full_rounds):
            old = where & (table.c[column] <= newest)
            number = table.c[column]
            newest_kept: ColumnElement[int] = func.max(number)
            # keep a round with a loss if there is one: otherwise losses of old rounds would have no metrics
            if table is metrics:
                has_loss = exists().where(losses.c.run_id == change.run_id, losses.c.round == number)
                newest_kept = func.coalesce(func.max(case((has_loss, number))), newest_kept)
            kept = select(newest_kept).where(old).group_by(number // bucket)
            surplus = table.delete().where(old, table.c[column].not_in(kept))
            held = has_checkpoint(table, column) | number.in_(change.kept)
            connection.execute(surplus if table is metrics else surplus.where(~held))

    _delete_oldest_metrics(connection, change.run_id)


def _drop_metrics(connection: Connection, change: DropMetrics) -> None:
    table = TABLES[NodeMetrics]
    connection.execute(table.delete().where(table.c.run_id == change.run_id, table.c.round > change.after_round))


def _drop_run(connection: Connection, change: DropRun) -> None:
    for record in OF_RUN:
        table = TABLES[record]
        connection.execute(table.delete().where(table.c.run_id == change.run_id))


def _delete_oldest_metrics(connection: Connection, run_id: str) -> None:
    """Keep the newest `MAX_METRICS_ROWS`, without those of the oldest round among them, which may be incomplete."""
    table = TABLES[NodeMetrics]
    ours = table.c.run_id == run_id
    newest_first = select(table.c.round).where(ours).order_by(table.c.round.desc())
    oldest = connection.scalar(newest_first.offset(retention.MAX_METRICS_ROWS).limit(1))
    if oldest is not None:
        connection.execute(table.delete().where(ours, table.c.round <= oldest))


def _replace_all(connection: Connection, record: type[NodeMetrics] | type[Credit], changes: Sequence[Change]) -> None:
    """Insert or replace rows of one table in two statements. Of two rows with the same key, the last one is used."""
    newest: dict[tuple[object, ...], dict[str, object]] = {}
    for row in changes:
        if isinstance(row, record):
            newest[tuple(getattr(row, name) for name in record.KEY)] = {
                item.name: getattr(row, item.name) for item in fields(row)
            }
    if newest:
        table = TABLES[record]
        same = [table.c[name] == bindparam(_KEY_PREFIX + name) for name in record.KEY]
        keys = [{_KEY_PREFIX + name: values[name] for name in record.KEY} for values in newest.values()]
        connection.execute(table.delete().where(*same), keys)
        connection.execute(table.insert(), list(newest.values()))


def _upsert(connection: Connection, row: Record) -> None:
    """Update or insert, in SQL that every database supports."""
    values = {item.name: getattr(row, item.name) for item in fields(row)}
    keys = {_KEY_PREFIX + name: values[name] for name in row.KEY}
    if connection.execute(_UPDATES[type(row)], {**values, **keys}).rowcount == 0:
        connection.execute(TABLES[type(row)].insert(), values)


def _append(connection: Connection, event: Event) -> None:
    """Insert an event. An id that exists already means that another coordinator wrote it."""
    values = {item.name: getattr(event, item.name) for item in fields(event)}
    try:
        connection.execute(TABLES[Event].insert(), values)
    except IntegrityError as error:
        raise already_owned("") from error


def apply_changes(connection: Connection, changes: Sequence[Change]) -> None:
    """Apply the changes of one step in order; metrics and credits of nodes, which are many, together at the end."""
    for change in changes:
        _apply(connection, change)
    _replace_all(connection, NodeMetrics, changes)
    _replace_all(connection, Credit, changes)


def _apply(connection: Connection, change: Change) -> None:
    match change:
        case Delete():
            _delete(connection, change)
        case Thin():
            _thin(connection, change)
        case DropMetrics():
            _drop_metrics(connection, change)
        case DropRun():
            _drop_run(connection, change)
        case Event():
            _append(connection, change)
        case _ if not isinstance(change, NodeMetrics | Credit):
            _upsert(connection, change)


def _delete(connection: Connection, change: Delete) -> None:
    table = TABLES[change.record]
    same = [table.c[name] == value for name, value in zip(change.record.KEY, change.key, strict=True)]
    connection.execute(table.delete().where(*same))
