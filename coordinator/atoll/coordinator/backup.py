"""Backup and restore: keys, admin credential and database as one file.

`write` may run while the coordinator serves: SQLite copies a consistent snapshot, other databases are read in one
transaction; in both cases the archive holds an SQLite file. `restore` makes a complete data directory, or none.

A restored coordinator does not know what it signed after the backup. Plans and deny-lists continue above any number
that may have been issued. It abstains from votes until that is safe (`rounds/coordinator_seat.py`). All tokens are
revoked, because their uses may have been spent since.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from atoll.coordinator.backup_archive import pack, unpack
from atoll.coordinator.store.copying import copy_rows
from atoll.coordinator.store.records import Change, DenyRow, Event, Run
from atoll.coordinator.store.sql import SqlStore
from atoll.core.certs import certificate_sha256
from atoll.core.disk import OS_DISK
from atoll.core.errors import AlreadyExists, Busy, DatabaseCorrupt, DataDirUnusable
from atoll.core.files import data_dir_unusable, read_private
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, issue_deny_list

DATABASE = "coordinator.db"
KEYS = ("ca.key", "ca.crt", "operator.key")
AUTHORITIES = ("ca-next.json", "ca-previous.json")
CREDENTIAL = ("admin/admin.key", "admin/admin.crt", "admin/ca.crt", "admin/admin.toml")
SKIPPED_NUMBERS = 1000  # plan and deny-list numbers that may have been issued since the backup, plus
SKIPPED_NUMBERS_PER_SECOND = 10  # plus so many for every second since the backup
_BUSY_SECONDS = 30.0


@dataclass(frozen=True)
class BackupResult:
    """Result of a backup or a restore, for messages."""

    path: Path
    ca_sha256: str
    created_unix_ms: int


def write(data_dir: Path, database_url: str, target: Path, unix_ms: int) -> BackupResult:
    """Write a backup to the new file `target`, mode 0600.

    Raises `AlreadyExists`, `DataDirUnusable`, `DatabaseCorrupt`.
    """
    missing = [name for name in KEYS if not (data_dir / name).is_file()]
    if missing:
        raise DataDirUnusable(
            f"{data_dir} is no coordinator's data directory: it lacks {', '.join(missing)}", "name it with --data-dir"
        )
    if target.exists():
        raise AlreadyExists(f"{target} exists already", "name a new file")
    with _staging(target) as staging:
        copy = staging / DATABASE
        if database_url.startswith("sqlite:"):
            _copy_sqlite(_sqlite_path(database_url), copy)
        else:
            copy_rows(database_url, f"sqlite:///{copy}")
        sources = {name: data_dir / name for name in (*KEYS, *AUTHORITIES, *CREDENTIAL) if (data_dir / name).is_file()}
        sources[DATABASE] = copy
        archive, present = staging / "archive", read_private(data_dir / "ca.crt")
        pack(archive, sources, unix_ms)
        if read_private(data_dir / "ca.crt") != present:
            raise Busy("the certificate authority was replaced just now", "nothing was written; try again")
        try:
            os.link(archive, target)  # unlike a rename, this never replaces a file
            OS_DISK.sync_directory(target.parent)
        except FileExistsError as error:
            raise AlreadyExists(f"{target} exists already", "name a new file") from error
        except OSError as error:
            raise data_dir_unusable(target, error) from error
    return _result(target, data_dir, unix_ms)


def restore(archive: Path, data_dir: Path, database_url: str, unix_ms: int) -> BackupResult:
    """Make a new data directory from a backup. `database_url`: an empty database; empty: SQLite in the directory.

    Raises `AlreadyExists` for a directory or a database that is not empty, `BackupCorrupt`, `DataDirUnusable`.
    """
    if data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir())):
        raise AlreadyExists(f"{data_dir} is not empty", "restore into a new directory and move it afterwards")
    with _staging(data_dir) as staging:
        directory = staging / "data"
        directory.mkdir(mode=0o700)
        created = unpack(archive, directory, (*KEYS, DATABASE), (*AUTHORITIES, *CREDENTIAL))
        database = directory / DATABASE
        _mark_as_restored(f"sqlite:///{database}", directory / "operator.key", created, unix_ms)
        _check_and_merge_wal(database)
        if database_url:
            copy_rows(f"sqlite:///{database}", database_url)
            database.unlink()
        try:
            OS_DISK.sync_directory(directory)
            OS_DISK.rename(directory, data_dir)
            OS_DISK.sync_directory(data_dir.parent)
        except OSError as error:
            raise data_dir_unusable(data_dir, error) from error
    return _result(data_dir, data_dir, created)


def _mark_as_restored(url: str, operator_key: Path, created_ms: int, unix_ms: int) -> None:
    """Raise the floors of plan and deny-list numbers, revoke tokens and log the restore, in one transaction."""
    skipped = SKIPPED_NUMBERS + SKIPPED_NUMBERS_PER_SECOND * max(0, unix_ms - created_ms) // 1000
    operator = Identity.load(operator_key)
    store = SqlStore(url)
    try:
        contents = store.load()
        empty = issue_deny_list(operator, EMPTY_DENY_LIST.number, EMPTY_DENY_LIST.peer_ids, unix_ms / 1000)
        deny = contents.deny or DenyRow(EMPTY_DENY_LIST.number, empty.SerializeToString())
        message = "restored from a backup: all tokens are revoked; the coordinator votes after a round of a newer plan"
        changes: list[Change] = [
            *(replace(run, plan_floor=_newest_plan(run) + skipped) for run in contents.runs),
            *(replace(trace, plan_version=trace.plan_version + skipped) for trace in contents.deleted_runs),
            *(replace(token, revoked=True) for token in contents.tokens),
            replace(deny, number=deny.number + skipped),
            Event(contents.last_event_id + 1, unix_ms, "coordinator.restored", "", "", message),
        ]
        store.apply(changes)
    finally:
        store.close()


def _newest_plan(run: Run) -> int:
    return max(run.plan_version, run.plan_floor, run.plans_before)


# --- databases ---------------------------------------------------------------------------------------


def _sqlite_path(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


def _copy_sqlite(source: Path, target: Path) -> None:
    """Copy a database in use consistently, with SQLite's backup API: neither side waits for the other."""
    try:
        source_connection = sqlite3.connect(f"file:{quote(str(source))}?mode=ro", uri=True, timeout=_BUSY_SECONDS)
        try:
            target_connection = sqlite3.connect(target)
            try:
                source_connection.backup(target_connection)
            finally:
                target_connection.close()
        finally:
            source_connection.close()
        target.chmod(0o600)
        _check_and_merge_wal(target)
    except sqlite3.Error as error:
        raise DatabaseCorrupt(f"the database {source} cannot be copied: {error}") from error


def _check_and_merge_wal(path: Path) -> None:
    """Check the database and merge its WAL, so that one file remains. Raises `DatabaseCorrupt`."""
    try:
        connection = sqlite3.connect(path)
        try:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            connection.execute("PRAGMA journal_mode=DELETE").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise DatabaseCorrupt(f"the database {path} cannot be used: {error}") from error
    if verdict != "ok":
        raise DatabaseCorrupt(f"the database {path} is damaged: {verdict}")


# --- shared ------------------------------------------------------------------------------------------


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Yield a private directory next to `target`; remove the directory afterwards. Raises `DataDirUnusable`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise data_dir_unusable(target, error) from error
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _result(path: Path, directory: Path, unix_ms: int) -> BackupResult:
    return BackupResult(path, certificate_sha256((directory / "ca.crt").read_bytes()), unix_ms)
