"""`atoll-coordinator backup` and `restore`: all state of a coordinator in one file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.output import Output, OutputOption, print_json, print_to_stderr

if TYPE_CHECKING:
    from atoll.coordinator.backup import BackupResult

ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="a TOML file with settings")]
DataDirOption = Annotated[Path | None, typer.Option(help="the coordinator's data directory")]
Database = Annotated[
    str | None,
    typer.Option(metavar="URL|file:PATH", help="SQLAlchemy URL, or a file with the URL; default: SQLite in data-dir"),
]


def backup(
    target: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="new file, or a directory for it")],
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    database: Database = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write keys, credential and database to one file. The coordinator may serve at the same time.

    The file grants the operator's rights: protect it like the keys.

    [bold]Example[/bold]

      atoll-coordinator backup /srv/backups
    """
    from atoll.coordinator import backup as backups
    from atoll.coordinator.config import load
    from atoll.coordinator.paths import default_data_dir

    flags = {"data_dir": data_dir, "database": database}
    settings = load(flags, os.environ, config, default_data_dir(os.environ, os.getuid())).config
    now = time.time()
    file = (
        target / time.strftime("atoll-coordinator-%Y%m%dT%H%M%SZ.tar", time.gmtime(now)) if target.is_dir() else target
    )
    made = backups.write(settings.data_dir, settings.database_url, file.absolute(), int(now * 1000))
    _print_result(made, output, f"backed up; CA fingerprint {made.ca_sha256[:16]}…")


def restore(
    archive: Annotated[Path, typer.Argument(metavar="FILE", help="a file that `backup` wrote")],
    data_dir: Annotated[Path, typer.Option(help="a new or empty directory")],
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL|file:PATH",
            help="URL of an empty database to fill, or a file with the URL; "
            "default: $ATOLL_COORDINATOR_DATABASE, else SQLite in data-dir",
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Create a data directory from a backup. Use this only if the original coordinator will never run again.

    [bold]Example[/bold]

      atoll-coordinator restore atoll-coordinator-20260101T030000Z.tar --data-dir /var/lib/atoll/coordinator
    """
    from atoll.coordinator import backup as backups
    from atoll.coordinator import database_url

    database_url.refuse_password(database or "")
    url = database_url.resolve(os.environ.get(database_url.VARIABLE, "") if database is None else database)
    made = backups.restore(archive, data_dir.expanduser().absolute(), url, int(time.time() * 1000))
    _print_result(
        made, output, f"restored; CA fingerprint {made.ca_sha256[:16]}…. All join tokens are revoked: create new ones"
    )


def _print_result(made: BackupResult, output: Output, sentence: str) -> None:
    if output is Output.JSON:
        facts = {"path": str(made.path), "ca_sha256": made.ca_sha256, "created_unix_ms": made.created_unix_ms}
        print_json({"backup": facts})
        return
    print_to_stderr(sentence)
    print(made.path)
