"""A PostgreSQL server of this test run's own: Debian's binaries, an unprivileged user, a Unix socket, no network."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 60
UNPRIVILEGED = ("postgres", "nobody")  # whoever exists, where the tests run as root: the server refuses to


@dataclass
class Postgres:
    """One that runs."""

    socket_dir: Path
    user: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def url(self, database: str = "postgres") -> str:
        """Of SQLAlchemy."""
        return f"postgresql+psycopg://{self.user}@/{database}?host={self.socket_dir}"

    def fresh(self) -> str:
        """URL of an empty database."""
        import psycopg

        name = f"fresh{next(self.numbers)}"
        with psycopg.connect(host=str(self.socket_dir), user=self.user, dbname="postgres", autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name}")
        return self.url(name)


def missing() -> str:
    """Why there can be none here; empty when there can."""
    if importlib.util.find_spec("psycopg") is None:
        return "PostgreSQL was NOT tested: psycopg is not installed"
    if _binaries() is None:
        return "PostgreSQL was NOT tested: no initdb and pg_ctl (Debian: apt-get install postgresql)"
    return ""


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """Make a cluster, start it, stop it, remove it."""
    binaries = _binaries()
    assert binaries is not None, missing()
    account = _account()
    directory = Path(tempfile.mkdtemp(prefix="atoll-pg-"))
    try:
        os.chown(directory, account.pw_uid, account.pw_gid)
        cluster = directory / "cluster"
        _run(account, binaries / "initdb", "--auth=trust", "--no-sync", "-U", account.pw_name, "-D", cluster)
        options = f"-k {directory} -c listen_addresses='' -c fsync=off"
        start = ["-w", "-t", str(SECONDS), "-o", options, "-l", directory / "log", "start"]
        _run(account, binaries / "pg_ctl", "-D", cluster, *start)
        try:
            yield Postgres(directory, account.pw_name)
        finally:
            _run(account, binaries / "pg_ctl", "-D", cluster, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _binaries() -> Path | None:
    found = [path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    named = shutil.which("initdb")
    found += [Path(named).resolve().parent] if named else []
    return next((path for path in reversed(found) if (path / "pg_ctl").exists()), None)


def _account() -> pwd.struct_passwd:
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    for name in UNPRIVILEGED:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise LookupError(f"none of {UNPRIVILEGED} exists")


def _run(account: pwd.struct_passwd, *command: str | Path) -> None:
    as_root = os.geteuid() == 0
    subprocess.run(
        [str(part) for part in command],
        check=True,
        timeout=SECONDS,
        stdout=subprocess.DEVNULL,  # the server inherits them, and would hold a pipe open
        stderr=subprocess.DEVNULL,
        cwd="/",
        user=account.pw_uid if as_root else None,
        group=account.pw_gid if as_root else None,
        extra_groups=[] if as_root else None,
    )
