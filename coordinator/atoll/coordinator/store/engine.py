"""Connections to a database; its failures are raised as `AtollError`s."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError

from atoll.coordinator.database_url import printable
from atoll.coordinator.store import migrations
from atoll.core.errors import AtollError, ConfigError, DatabaseCorrupt, DataDirUnusable, Unreachable

_ACCESS_DENIED_TEXTS = (
    "authentication failed",
    "does not exist",
    "no password supplied",
)  # PostgreSQL errors for which a retry is useless
_BUSY_SECONDS = 10


@contextmanager
def database_errors(engine: Engine, url: str) -> Iterator[None]:
    """Convert every database failure in the block to an `AtollError`. `url`: without a password."""
    try:
        yield
    except migrations.UnknownRevision as error:
        raise DatabaseCorrupt(
            f"{url} was written by another release: {error}", "run the release that wrote it, or a newer one"
        ) from error
    except DBAPIError as error:
        raise _failure(url, str(error.orig), isinstance(error, OperationalError), engine.dialect.name) from error
    except (SQLAlchemyError, ValueError) as error:
        raise corrupt(url, str(error)) from error


def _failure(url: str, text: str, operational: bool, dialect: str) -> AtollError:
    if dialect == "sqlite" or not operational:
        return _local_failure(url, text)
    if any(word in text for word in _ACCESS_DENIED_TEXTS):
        return ConfigError(f"{url} denies access: {text}", "check user, password and name in --database")
    return Unreachable(
        f"cannot reach the database {url}: {text}",
        "check that its server runs and accepts connections; acknowledged data is safe there",
    )


def _local_failure(url: str, text: str) -> AtollError:
    unusable = ("unable to open", "readonly", "disk is full", "disk I/O", "locked", "permission")
    if any(word in text for word in unusable):
        return DataDirUnusable(
            f"cannot use the database {url}: {text}",
            "check the owner, the permissions and the free space of its directory",
        )
    return corrupt(url, text)


def corrupt(url: str, text: str) -> DatabaseCorrupt:
    """Return the error for a damaged database, which is not changed."""
    return DatabaseCorrupt(
        f"the database {url} cannot be used: {text}",
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
    connection.isolation_level = None  # otherwise the driver would commit before DDL; `_on_begin` begins transactions
    for pragma in (f"busy_timeout={_BUSY_SECONDS * 1000}", "journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
