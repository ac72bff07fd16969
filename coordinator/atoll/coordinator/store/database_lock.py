"""Ownership of the database: only one coordinator may write to it at a time.

A coordinator takes a lock that ends with its process: on a file beside an SQLite database, or an advisory lock of a
PostgreSQL session. It also increments the generation in the table `owner`. Every writing transaction begins with
`check_ownership`. So if a lock is lost, as when a database server restarts, and another coordinator takes the
database, the first one overwrites nothing. The table is not part of the state: no migration creates it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import BigInteger, Column, Connection, Engine, MetaData, Table, Text, select, text
from sqlalchemy.exc import OperationalError

from atoll.core.errors import AlreadyRunning, DataDirUnusable
from atoll.core.file_lock import FileLocked, lock_file

OWNER_TABLE = Table(
    "owner",
    MetaData(),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("generation", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
)
_ONLY_ROW = 1
_ADVISORY_LOCK = int.from_bytes(b"atoll", "big")  # advisory locks of PostgreSQL are per database
_PATIENCE_MS = 5_000  # a server may notice late that a coordinator's session has ended, and release its lock then


class DatabaseLock:
    """Lock held until `close` or the end of the process. Raises `AlreadyRunning`, `DataDirUnusable`."""

    def __init__(self, engine: Engine, holder: str) -> None:
        self.close: Callable[[], None] = lambda: None
        path = sqlite_file(engine)
        if path is not None:
            self._lock_file(path.with_name(f"{path.name}.lock"), holder)
        elif engine.dialect.name == "postgresql":
            self._lock_session(engine)

    def _lock_file(self, path: Path, holder: str) -> None:
        try:
            descriptor = lock_file(path, holder)
        except FileLocked as first:
            raise already_owned(str(first)) from None
        except OSError as error:
            raise DataDirUnusable(
                f"unable to open {path}: {error.strerror}", "check the owner and the permissions of its directory"
            ) from error
        self.close = lambda: os.close(descriptor)

    def _lock_session(self, engine: Engine) -> None:
        session = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        session.execute(text(f"SET lock_timeout = {_PATIENCE_MS}"))
        try:
            session.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _ADVISORY_LOCK})
        except OperationalError as error:
            first = _holder(session)  # raises the error again if the session is lost
            session.invalidate()  # otherwise the pool would keep this session's time limit
            raise already_owned(first) from error

        def end() -> None:
            session.invalidate()  # otherwise the pool would keep the session, and with it the lock
            session.close()

        self.close = end


def claim_ownership(connection: Connection, holder: str) -> int:
    """Become the owner; returns the generation for `check_ownership`. The caller holds the lock."""
    OWNER_TABLE.create(connection, checkfirst=True)
    before = connection.scalar(select(OWNER_TABLE.c.generation).where(OWNER_TABLE.c.id == _ONLY_ROW).with_for_update())
    generation = (before or 0) + 1
    values = {"generation": generation, "holder": holder}
    if before is None:
        connection.execute(OWNER_TABLE.insert().values(id=_ONLY_ROW, **values))
    else:
        connection.execute(OWNER_TABLE.update().where(OWNER_TABLE.c.id == _ONLY_ROW).values(**values))
    return generation


def check_ownership(connection: Connection, generation: int) -> None:
    """Raise `AlreadyRunning` unless this generation is the newest. Later claims wait for this transaction."""
    same = OWNER_TABLE.c.generation == generation
    if connection.execute(OWNER_TABLE.update().where(same).values(generation=generation)).rowcount == 0:
        raise already_owned(_holder(connection))


def already_owned(holder: str) -> AlreadyRunning:
    """Return the error for a coordinator that is not the owner."""
    owner = f" ({holder})" if holder else ""
    return AlreadyRunning(
        f"another coordinator{owner} uses this database", "stop one of the two: a database belongs to one coordinator"
    )


def sqlite_file(engine: Engine) -> Path | None:
    """File of an SQLite database; None for one in memory and for other databases."""
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return Path(name).resolve()


def _holder(connection: Connection) -> str:
    if not connection.dialect.has_table(connection, OWNER_TABLE.name):
        return ""
    return connection.scalar(select(OWNER_TABLE.c.holder)) or ""
