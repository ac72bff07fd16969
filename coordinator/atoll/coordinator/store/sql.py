"""`SqlStore`: the store on any SQLAlchemy URL; SQLite in WAL mode with `synchronous=FULL` by default.

With WAL and FULL, SQLite calls fsync at every commit: acknowledged data survives a power cut, and readers never wait
for the writer. The migrations create the schema at start; `tables.py` mirrors it. Every database failure becomes one
of our errors. A damaged file is reported and never overwritten. A store with an `owner` excludes all others
(`database_lock.py`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
    Update,
    bindparam,
    case,
    create_engine,
    event,
    exists,
    func,
    inspect,
    select,
)
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)

from atoll.coordinator.database_url import printable
from atoll.coordinator.store import migrations, retention
from atoll.coordinator.store.database_lock import (
    DatabaseLock,
    already_owned,
    check_ownership,
    claim_ownership,
    sqlite_file,
)
from atoll.coordinator.store.records import (
    OF_RUN,
    Change,
    Checkpoint,
    Credit,
    Delete,
    DeletedRun,
    DenyRow,
    DropMetrics,
    DropRun,
    Evaluation,
    Event,
    ForgottenNode,
    Node,
    NodeMetrics,
    PlanFigures,
    PlanRow,
    ProofRow,
    Record,
    Round,
    Run,
    Thin,
    Token,
    Vote,
)
from atoll.coordinator.store.store import ALL_EVENTS, Contents, EventFilter, MetricsPage, RoundMeans, Store
from atoll.coordinator.store.tables import TABLES
from atoll.core.errors import AtollError, ConfigError, DatabaseCorrupt, DatabaseMissing, DataDirUnusable, Unreachable

_R = TypeVar("_R", bound=Record)
_ACCESS_DENIED_TEXTS = (
    "authentication failed",
    "does not exist",
    "no password supplied",
)  # PostgreSQL errors that a retry does not cure
_BUSY_SECONDS = 10
_KEY_PREFIX = "key_"
_UPDATES: dict[type[Record], Update] = {  # built once: to build one takes longer than to execute it
    record: table.update().where(*(table.c[name] == bindparam(_KEY_PREFIX + name) for name in record.KEY))
    for record, table in TABLES.items()
}


class SqlStore(Store):
    """Store in a SQL database.

    Raises `DatabaseCorrupt`, `DataDirUnusable` or `ConfigError` if the database cannot be used, and `Unreachable` if
    its server does not respond (yet).
    """

    def __init__(self, url: str, owner: str = "", *, may_create: bool = True) -> None:
        """Open the database. `owner` names the new owner for people; empty for a private copy.

        Raises `AlreadyRunning` while another owner has it, `DatabaseMissing` if it has no tables and `may_create` is
        false.
        """
        self._printable_url = printable(url)
        self._engine = open_engine(url)
        self._lock: DatabaseLock | None = None
        self._generation = 0
        try:
            with self._store_errors():
                if not may_create and self._is_empty():
                    raise DatabaseMissing(
                        f"the keys exist, but {self._printable_url} holds no coordinator's database",
                        "put the database back, or restore a backup. To start with an empty one, in which every node "
                        "must enrol again: `atoll-coordinator serve --new-database`, once",
                    )
                if owner:
                    self._lock = DatabaseLock(self._engine, owner)
                if self._engine.dialect.name == "sqlite":
                    self._check_file()
                migrations.upgrade(self._engine)
                if owner:
                    with self._engine.begin() as connection:
                        self._generation = claim_ownership(connection, owner)
        except AtollError:
            self.close()
            raise

    def load(self) -> Contents:
        with self._reading() as connection:
            table = TABLES[DenyRow]
            denied = _all(connection, DenyRow, select(table).order_by(table.c.number.desc()).limit(1))
            return Contents(
                tokens=_all(connection, Token, _select(Token)),
                nodes=_all(connection, Node, _select(Node)),
                runs=_all(connection, Run, _select(Run)),
                plans=_all(connection, PlanRow, _select(PlanRow)),
                rounds=_all(connection, Round, _select_rounds().where(_is_loaded())),
                deny=denied[0] if denied else None,
                last_event_id=connection.scalar(select(func.max(TABLES[Event].c.event_id))) or 0,
                votes=_all(connection, Vote, _select(Vote)),
                checkpoints=_all(connection, Checkpoint, _select(Checkpoint)),
                plan_figures=_all(connection, PlanFigures, _select(PlanFigures)),
                credits=_all(connection, Credit, _select(Credit)),
                deleted_runs=_all(connection, DeletedRun, _select(DeletedRun)),
                forgotten_nodes=_all(connection, ForgottenNode, _select(ForgottenNode)),
            )

    def apply(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        with self._store_errors(), self._engine.begin() as connection:
            if self._lock is not None:
                check_ownership(connection, self._generation)
            for change in changes:
                _apply(connection, change)
            _replace_metrics(connection, [change for change in changes if isinstance(change, NodeMetrics)])

    def events(self, after_id: int, limit: int, wanted: EventFilter = ALL_EVENTS) -> tuple[Event, ...]:
        with self._reading() as connection:
            return _all(connection, Event, _select_events(after_id, wanted).limit(limit))

    def newest_events(self, after_id: int, limit: int, wanted: EventFilter) -> tuple[Event, ...]:
        newest_first = TABLES[Event].c.event_id.desc()
        rows = _select_events(after_id, wanted).order_by(None).order_by(newest_first).limit(limit)
        with self._reading() as connection:
            return _all(connection, Event, rows)[::-1]

    def rounds(self, run_id: str, after_round: int, limit: int) -> tuple[Round, ...]:
        table = TABLES[Round]
        wanted = _select_rounds().where(table.c.run_id == run_id, table.c.number > after_round).limit(limit)
        with self._reading() as connection:
            return _all(connection, Round, wanted)

    def newest_rounds(self, run_id: str, limit: int) -> tuple[Round, ...]:
        table = TABLES[Round]
        newest_first = [table.c[name].desc() for name in Round.KEY]
        wanted = _select_rounds().where(table.c.run_id == run_id).order_by(None).order_by(*newest_first).limit(limit)
        with self._reading() as connection:
            return _all(connection, Round, wanted)[::-1]

    def evaluations(self, run_id: str, most: int | None = None) -> tuple[Evaluation, ...]:
        table = TABLES[Evaluation]
        ours = table.c.run_id == run_id
        wanted = _select(Evaluation).where(ours)
        with self._reading() as connection:
            if most is not None:
                of_all = select(func.count(), func.min(table.c.round), func.max(table.c.round))
                count, first, last = connection.execute(of_all.where(ours)).one()
                if count > most:  # read from the index of keys
                    place = (table.c.round - first) // -(-(last - first + 1) // most)
                    kept = select(func.max(table.c.round)).where(ours).group_by(place)
                    wanted = wanted.where(table.c.round.in_(kept))
            return _all(connection, Evaluation, wanted)

    def node_metrics(self, run_id: str, wanted: MetricsPage) -> tuple[NodeMetrics, ...]:
        table = TABLES[NodeMetrics]
        later = (table.c.round > wanted.since_round) | (table.c.peer_id > wanted.after_peer_id)
        rows = select(table).where(table.c.run_id == run_id, table.c.round >= wanted.since_round, later)
        if wanted.peers:
            rows = rows.where(table.c.peer_id.in_(wanted.peers))
        order = (table.c.round, table.c.peer_id)
        rows = rows.order_by(*(key.desc() if wanted.newest else key for key in order)).limit(wanted.limit)
        with self._reading() as connection:
            found = _all(connection, NodeMetrics, rows)
        return found[::-1] if wanted.newest else found

    def round_means(self, run_id: str, rounds: Sequence[int]) -> tuple[RoundMeans, ...]:
        table = TABLES[NodeMetrics]
        loss = func.avg(func.nullif(table.c.train_loss, 0.0))
        speed = func.sum(table.c.tokens / func.nullif(table.c.seconds, 0.0))
        rows = select(table.c.round, loss, speed).where(table.c.run_id == run_id, table.c.round.in_(rounds))
        with self._reading() as connection:
            found = connection.execute(rows.group_by(table.c.round).order_by(table.c.round))
            return tuple(RoundMeans(number, float(mean or 0.0), float(total or 0.0)) for number, mean, total in found)

    def plan(self, run_id: str, version: int) -> PlanRow | None:
        table = TABLES[PlanRow]
        wanted = _select(PlanRow).where(table.c.run_id == run_id, table.c.version == version)
        with self._reading() as connection:
            rows = _all(connection, PlanRow, wanted)
        return rows[0] if rows else None

    def plan_figures(self, run_id: str) -> tuple[PlanFigures, ...]:
        with self._reading() as connection:
            return _all(connection, PlanFigures, _select(PlanFigures).where(TABLES[PlanFigures].c.run_id == run_id))

    def proofs(self, run_id: str) -> tuple[ProofRow, ...]:
        wanted = _select(ProofRow)
        with self._reading() as connection:
            return _all(connection, ProofRow, wanted.where(TABLES[ProofRow].c.run_id == run_id) if run_id else wanted)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._engine.dispose()

    def _is_empty(self) -> bool:
        """True if the database has no schema. Checks the path first: SQLite creates a file on connect."""
        path = sqlite_file(self._engine)
        return (path is not None and not path.exists()) or not inspect(self._engine).has_table("alembic_version")

    def _check_file(self) -> None:
        with self._engine.connect() as connection:
            verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if verdict != "ok":
            raise self._corrupt(str(verdict))

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._store_errors(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except migrations.UnknownRevision as error:
            raise DatabaseCorrupt(
                f"{self._printable_url} was written by another release: {error}",
                "run the release that wrote it, or a newer one",
            ) from error
        except DBAPIError as error:
            text, lost = str(error.orig), self._engine.dialect.name != "sqlite" and isinstance(error, OperationalError)
            if lost and any(word in text for word in _ACCESS_DENIED_TEXTS):
                raise ConfigError(
                    f"{self._printable_url} denies access: {text}", "check user, password and name in --database"
                ) from error
            raise (self._no_server if lost else self._local_error)(text) from error
        except (SQLAlchemyError, ValueError) as error:
            raise self._corrupt(str(error)) from error

    def _local_error(self, text: str) -> AtollError:
        unusable = ("unable to open", "readonly", "disk is full", "disk I/O", "locked", "permission")
        if any(word in text for word in unusable):
            return DataDirUnusable(
                f"cannot use the database {self._printable_url}: {text}",
                "check the owner, the permissions and the free space of its directory",
            )
        return self._corrupt(text)

    def _no_server(self, text: str) -> Unreachable:
        return Unreachable(
            f"cannot reach the database {self._printable_url}: {text}",
            "check that its server runs and accepts connections; acknowledged data is safe there",
        )

    def _corrupt(self, text: str) -> DatabaseCorrupt:
        return DatabaseCorrupt(
            f"the database {self._printable_url} cannot be used: {text}",
            "restore it (with its -wal file) from a backup; the coordinator left it unchanged. "
            "With an empty database every node must enrol again",
        )


def open_engine(url: str) -> Engine:
    """Connections to a database, configured as the store needs them. Raises `ConfigError`."""
    try:
        engine = create_engine(
            url, pool_pre_ping=not url.startswith("sqlite")
        )  # reconnects after a restart of the server
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise ConfigError(f"database {printable(url)!r} is not usable: {error}", "see --database") from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _on_connect)
        event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the driver would commit before DDL; `_on_begin` begins instead
    for pragma in (f"busy_timeout={_BUSY_SECONDS * 1000}", "journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _select(record: type[Record]) -> Select[Any]:
    table = TABLES[record]
    return select(table).order_by(*(table.c[name] for name in record.KEY))


def _select_events(after_id: int, wanted: EventFilter) -> Select[Any]:
    table = TABLES[Event]
    rows = _select(Event).where(table.c.event_id > after_id)
    if wanted.run_id:
        rows = rows.where(table.c.run_id == wanted.run_id)
    if wanted.subjects:
        rows = rows.where(table.c.subject.in_(wanted.subjects))
    if wanted.kind:
        begins = table.c.kind.startswith(f"{wanted.kind}.", autoescape=True)
        rows = rows.where((table.c.kind == wanted.kind) | begins)
    return rows.where(table.c.unix_ms >= wanted.since_ms) if wanted.since_ms else rows


def _select_rounds() -> Select[Any]:
    """Rounds without the manifest column, which is large and only stored as evidence."""
    table = TABLES[Round]
    columns = [column for column in table.c if column.name != "manifest"]
    return select(*columns).order_by(*(table.c[name] for name in Round.KEY))


def _is_loaded() -> ColumnElement[bool]:
    """Condition on rounds that the machine needs: abandoned attempts, the newest rounds, and those of checkpoints."""
    rounds, runs = TABLES[Round], TABLES[Run]
    head = select(runs.c.head_round).where(runs.c.run_id == rounds.c.run_id).scalar_subquery()
    return ~rounds.c.committed | (rounds.c.number > head - retention.KEPT_COMMITS) | _has_checkpoint(rounds, "number")


def _has_checkpoint(table: Table, column: str) -> ColumnElement[bool]:
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
            if table is metrics:  # of a round with a loss, if there is one: else losses of old rounds have no metrics
                has_loss = exists().where(losses.c.run_id == change.run_id, losses.c.round == number)
                newest_kept = func.coalesce(func.max(case((has_loss, number))), newest_kept)
            kept = select(newest_kept).where(old).group_by(number // bucket)
            surplus = table.delete().where(old, table.c[column].not_in(kept))
            held = _has_checkpoint(table, column) | number.in_(change.kept)
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
    """Keep the newest `MAX_METRICS_ROWS`, without those of the oldest round among them, which may be cut."""
    table = TABLES[NodeMetrics]
    ours = table.c.run_id == run_id
    newest_first = select(table.c.round).where(ours).order_by(table.c.round.desc())
    oldest = connection.scalar(newest_first.offset(retention.MAX_METRICS_ROWS).limit(1))
    if oldest is not None:
        connection.execute(table.delete().where(ours, table.c.round <= oldest))


def _replace_metrics(connection: Connection, rows: Sequence[NodeMetrics]) -> None:
    """Insert or replace many rows in two statements. Of two rows with one key, the last counts."""
    newest = {(row.run_id, row.round, row.peer_id): asdict(row) for row in rows}
    if newest:
        table = TABLES[NodeMetrics]
        same = [table.c[name] == bindparam(_KEY_PREFIX + name) for name in NodeMetrics.KEY]
        keys = [{_KEY_PREFIX + name: values[name] for name in NodeMetrics.KEY} for values in newest.values()]
        connection.execute(table.delete().where(*same), keys)
        connection.execute(table.insert(), list(newest.values()))


def _all(connection: Connection, record: type[_R], wanted: Select[Any]) -> tuple[_R, ...]:
    return tuple(record(**row) for row in connection.execute(wanted).mappings())


def _upsert(connection: Connection, row: Record) -> None:
    """Update or insert, in SQL that every database supports."""
    values = {item.name: getattr(row, item.name) for item in fields(row)}
    keys = {_KEY_PREFIX + name: values[name] for name in row.KEY}
    if connection.execute(_UPDATES[type(row)], {**values, **keys}).rowcount == 0:
        connection.execute(TABLES[type(row)].insert(), values)


def _append(connection: Connection, event: Event) -> None:
    """Insert an event. A number in use means that another coordinator wrote it."""
    values = {item.name: getattr(event, item.name) for item in fields(event)}
    try:
        connection.execute(TABLES[Event].insert(), values)
    except IntegrityError as error:
        raise already_owned("") from error


def _apply(connection: Connection, change: Change) -> None:
    """Apply one change. Metrics are not among them: those of a step are replaced together."""
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
        case _ if not isinstance(change, NodeMetrics):
            _upsert(connection, change)


def _delete(connection: Connection, change: Delete) -> None:
    table = TABLES[change.record]
    same = [table.c[name] == value for name, value in zip(change.record.KEY, change.key, strict=True)]
    connection.execute(table.delete().where(*same))
