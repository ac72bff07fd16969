"""`SqlStore`: the store on any SQLAlchemy URL; SQLite in WAL mode with `synchronous=FULL` by default.

With WAL and FULL, SQLite calls fsync at every commit: acknowledged data survives a power cut, and readers never wait
for the writer. The migrations create the schema at start; `tables.py` mirrors it. Every database failure becomes one
of our errors. A damaged file is reported and never overwritten. A store with an `owner` excludes all others
(`database_lock.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, func, inspect, select

from atoll.coordinator.database_url import printable
from atoll.coordinator.store import migrations, retention
from atoll.coordinator.store.changes import apply_changes, has_checkpoint
from atoll.coordinator.store.database_lock import DatabaseLock, check_ownership, claim_ownership, sqlite_file
from atoll.coordinator.store.engine import corrupt, database_errors, open_engine
from atoll.coordinator.store.records import (
    Change,
    Checkpoint,
    Credit,
    DeletedRun,
    DenyRow,
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
    Token,
    Vote,
)
from atoll.coordinator.store.store import ALL_EVENTS, Contents, EventFilter, MetricsPage, RoundMeans, Store
from atoll.coordinator.store.tables import TABLES
from atoll.core.errors import AtollError, DatabaseMissing

_R = TypeVar("_R", bound=Record)


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
            with database_errors(self._engine, self._printable_url):
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
        with database_errors(self._engine, self._printable_url), self._engine.begin() as connection:
            if self._lock is not None:
                check_ownership(connection, self._generation)
            apply_changes(connection, changes)

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
                if count > most:  # counted from the index of keys
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
            raise corrupt(self._printable_url, str(verdict))

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with database_errors(self._engine, self._printable_url), self._engine.connect() as connection:
            yield connection


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
    """Rounds without the manifest column, which is large and stored only as evidence."""
    table = TABLES[Round]
    columns = [column for column in table.c if column.name != "manifest"]
    return select(*columns).order_by(*(table.c[name] for name in Round.KEY))


def _is_loaded() -> ColumnElement[bool]:
    """Condition for rounds that the machine loads: abandoned attempts, the newest rounds, and those of checkpoints."""
    rounds, runs = TABLES[Round], TABLES[Run]
    head = select(runs.c.head_round).where(runs.c.run_id == rounds.c.run_id).scalar_subquery()
    return ~rounds.c.committed | (rounds.c.number > head - retention.KEPT_COMMITS) | has_checkpoint(rounds, "number")


def _all(connection: Connection, record: type[_R], wanted: Select[Any]) -> tuple[_R, ...]:
    return tuple(record(**row) for row in connection.execute(wanted).mappings())
