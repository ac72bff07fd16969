"""`atollctl ca`: show, replace and retire the certificate authority."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.formatting import local_time, time_until
from atoll.coordinator.cli.options import CredentialsOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, print_sentences, show
from atoll.core.output import Output, OutputOption
from atoll.core.units import parse_duration
from atoll.v1 import admin_pb2 as wire

app = typer.Typer(help="The certificate authority: show, rotate, retire.", no_args_is_help=True)
_COLUMNS = [
    Column("authority", "sha256"),
    Column("state", "state"),
    Column("trusted until", "until"),
    Column("members", "members", align_right=True),
]


@app.command("show")
def show_authorities(output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Show the trusted certificate authorities, the end of the overlap, and how many members use each authority.

    [bold]Example[/bold]

      atollctl ca show
    """
    with connect(credentials) as client:
        _show(output, client.call(client.stub.GetAuthorities, wire.GetAuthoritiesRequest()))


@app.command()
def rotate(
    overlap: Annotated[
        str, typer.Option(metavar="DURATION", help="time for which the old authority stays trusted: 12h, 4d")
    ] = "4d",
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Make a new certificate authority. Members renew their certificates at once. The old one is retired later.

    The default overlap is the lifetime of a certificate: a node that is away for longer needs a token anyway.

    [bold]Example[/bold]

      atollctl ca rotate --overlap 4d
    """
    request = wire.RotateAuthorityRequest(overlap_seconds=int(parse_duration(overlap).total_seconds()))
    with connect(credentials) as client:
        _show(output, client.call(client.stub.RotateAuthority, request))


@app.command()
def retire(
    force: Annotated[
        bool, typer.Option("--force", help="retire the authority although members then need new tokens")
    ] = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """End trust in the old certificate authority before the overlap ends. Tokens that name it stop working.

    [bold]Example[/bold]

      atollctl ca retire
    """
    with connect(credentials) as client:
        _show(output, client.call(client.stub.RetireAuthority, wire.RetireAuthorityRequest(force=force)))


def _show(output: Output, view: wire.AuthoritiesView) -> None:
    rows: list[JsonObject] = [
        {
            "sha256": it.sha256,
            "state": "new" if view.until_unix_ms and not index else "old" if view.until_unix_ms else "in force",
            "until": local_time(view.until_unix_ms if index else it.expires_unix_ms),
            "members": it.members,
        }
        for index, it in enumerate(view.trusted)
    ]
    show(output, {"authorities": message_dict(view)}, _COLUMNS, rows)
    if output is Output.TEXT and view.until_unix_ms:
        when = time_until(view.until_unix_ms, time.time())
        sentences = [f"The old one is retired {when}; until then, tokens name it."]
        if view.waiting:
            sentences.append(f"Members with certificates of the old one only: {', '.join(view.waiting)}")
        print_sentences(sentences)
