"""Copy of all rows of one database into an empty one, for backups of databases other than SQLite."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from atoll.coordinator.store.engine import open_engine
from atoll.coordinator.store.sql import SqlStore
from atoll.coordinator.store.tables import METADATA
from atoll.core.errors import AlreadyExists, DatabaseCorrupt

_BATCH = 500


def copy_rows(source_url: str, target_url: str) -> None:
    """Copy all rows that one transaction sees. Creates the schema in the target, which must hold no row.

    Raises `AlreadyExists` for a target with rows, `DatabaseCorrupt`, `DataDirUnusable`, `ConfigError`.
    """
    SqlStore(target_url).close()  # creates the schema and raises connection errors
    source, target = open_engine(source_url), open_engine(target_url)
    try:
        with _snapshot(source) as source_connection, target.begin() as target_connection:
            _refuse_rows(target_connection)
            for table in METADATA.sorted_tables:
                for rows in source_connection.execute(select(table)).mappings().partitions(_BATCH):
                    target_connection.execute(table.insert(), [dict(row) for row in rows])
    except SQLAlchemyError as error:
        raise DatabaseCorrupt(f"the database cannot be copied: {error}") from error
    finally:
        source.dispose()
        target.dispose()


def _snapshot(engine: Engine) -> Connection:
    """A connection whose reads all see the same moment; SQLite does so by default."""
    connection = engine.connect()
    if engine.dialect.name == "sqlite":
        return connection
    return connection.execution_options(isolation_level="REPEATABLE READ")


def _refuse_rows(connection: Connection) -> None:
    for table in METADATA.sorted_tables:
        if connection.scalar(select(func.count()).select_from(table)):
            raise AlreadyExists(f"the database holds rows already, in {table.name}", "restore into an empty database")
