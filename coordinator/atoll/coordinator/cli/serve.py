"""`atoll-coordinator`: serve, back up and restore a coordinator; show its settings."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli import backup
from atoll.core.cli import run_cli
from atoll.core.output import Output, OutputOption, VersionOption

app = typer.Typer(
    name="atoll-coordinator",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(version: VersionOption = False) -> None:
    """Run the coordinator of Atoll swarms, back it up and restore it, show its settings."""


ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="a TOML file with settings")]
DataDirOption = Annotated[
    Path | None, typer.Option(help="directory of keys, database and admin credential; created at first use")
]
Listen = Annotated[str | None, typer.Option(metavar="HOST", help="address of both TLS ports \\[0.0.0.0]")]
EnrolPort = Annotated[int | None, typer.Option(help="port for nodes with a token \\[7700]; 0 picks a free one")]
MemberPort = Annotated[int | None, typer.Option(help="port for members and operators \\[7701]; 0 picks a free one")]
HttpHost = Annotated[str | None, typer.Option(metavar="HOST", help="address of the page and metrics \\[127.0.0.1]")]
HttpPort = Annotated[int | None, typer.Option(help="port of the page and metrics \\[7702]; 0 picks a free one")]
Public = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="address for enrolment, which join tokens contain")
]
PublicMember = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="address of the members' port as nodes see it")
]
Database = Annotated[
    str | None,
    typer.Option(metavar="URL|file:PATH", help="SQLAlchemy URL, or a file with the URL; default: SQLite in data-dir"),
]
NewDatabase = Annotated[bool, typer.Option("--new-database", help="begin with an empty database although keys exist")]
LostAfter = Annotated[
    float | None, typer.Option(help="seconds without a heartbeat stream until a node is removed from the plan \\[20]")
]
LogLevel = Annotated[str | None, typer.Option(help="level of log messages: debug, info, warning, error")]
LogFormat = Annotated[str | None, typer.Option(help="format of log messages: auto, console, json")]


@app.command()
def serve(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    listen: Listen = None,
    enrol_port: EnrolPort = None,
    member_port: MemberPort = None,
    http_host: HttpHost = None,
    http_port: HttpPort = None,
    public_endpoint: Public = None,
    public_member_endpoint: PublicMember = None,
    database: Database = None,
    new_database: NewDatabase = False,
    lost_after_seconds: LostAfter = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Serve until SIGTERM. The first start creates the keys, the database and the admin credential.

    [bold]Examples[/bold]

      atoll-coordinator serve --public-endpoint swarm.example.org:7700

      atoll-coordinator serve --data-dir /srv/atoll --listen 127.0.0.1 --enrol-port 0 --member-port 0 --http-port 0
    """
    flags = {key: value for key, value in locals().items() if key not in ("config", "new_database")}
    from atoll.coordinator import server
    from atoll.coordinator.config import load
    from atoll.coordinator.paths import default_data_dir
    from atoll.core import clock, log, sdnotify

    settings = load(flags, os.environ, config, default_data_dir(os.environ, os.getuid())).config
    log.configure(settings.log_level, settings.log_format)
    systemd = server.Systemd(os.environ.get("NOTIFY_SOCKET", ""), sdnotify.watchdog_seconds(os.environ))
    asyncio.run(server.serve(settings, clock.SystemClock(), systemd, new_database=new_database))


@app.command("config")
def show_config(config: ConfigOption = None, output: OutputOption = Output.TEXT) -> None:
    """Show every setting, its value, and the source of the value.

    [bold]Example[/bold]

      ATOLL_COORDINATOR_HTTP_PORT=8080 atoll-coordinator config
    """
    from atoll.coordinator.cli.output import Column, show
    from atoll.coordinator.config import load
    from atoll.coordinator.database_url import printable
    from atoll.coordinator.paths import default_data_dir

    loaded = load({}, os.environ, config, default_data_dir(os.environ, os.getuid()))
    values = json.loads(loaded.config.model_dump_json())
    values["database"] = printable(values["database"])
    rows = [{"key": key, "value": value, "origin": loaded.origin[key]} for key, value in values.items()]
    show(output, {"settings": rows}, [Column("key"), Column("value"), Column("origin")], rows)


app.command("backup")(backup.backup)
app.command("restore")(backup.restore)


def main() -> None:
    """Run `atoll-coordinator`."""
    run_cli(app)
