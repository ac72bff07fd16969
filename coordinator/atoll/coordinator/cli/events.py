"""`atollctl events`: print the event log; follow new events."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.formatting import local_time
from atoll.coordinator.cli.options import CredentialsOption
from atoll.coordinator.cli.output import message_dict
from atoll.coordinator.sanitize import clean
from atoll.coordinator.store.records import MAX_INTEGER
from atoll.core.output import Output, OutputOption, print_json_line
from atoll.core.units import parse_duration
from atoll.v1 import admin_pb2 as wire

MAX_MESSAGE_CHARACTERS = 2000


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep running and print new events")] = False,
    after: Annotated[
        int, typer.Option(min=0, max=MAX_INTEGER, metavar="ID", help="print only events after this id")
    ] = 0,
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="print only events of this run")] = "",
    node: Annotated[str, typer.Option("--node", metavar="NODE", help="print only events about this node")] = "",
    kind: Annotated[
        str,
        typer.Option(
            "--kind", metavar="KIND", help="print only this kind, for example `node.lost`, or all kinds of `node`"
        ),
    ] = "",
    since: Annotated[
        str, typer.Option("--since", metavar="DURATION", help="print only events of this last time: 30m, 2h, 1d")
    ] = "",
    tail: Annotated[
        int | None,
        typer.Option("--tail", min=1, max=10_000, metavar="N", help="print only the newest N of the selected events"),
    ] = None,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Print the event log, the oldest event first. With --output json, one object per line.

    [bold]Examples[/bold]

      atollctl events --follow

      atollctl events --after 120 --output json

      atollctl events --node basement --since 2h

      atollctl events --kind round --tail 20 --follow
    """
    request = wire.EventsRequest(
        after_id=after,
        follow=follow,
        run_id=run,
        node=node,
        kind=kind,
        since_seconds=max(1, math.ceil(parse_duration(since).total_seconds())) if since else 0,
        tail=tail or 0,
    )
    console = Console(highlight=False, soft_wrap=True)
    with connect(credentials) as client:
        try:
            for event in client.stream(client.stub.Events, request):
                if output is Output.JSON:
                    print_json_line({"event": message_dict(event)})
                else:
                    console.print(_line(event))
        except KeyboardInterrupt:  # Ctrl-C ends --follow
            return


def _line(event: wire.Event) -> Text:
    return Text.assemble(
        (f"{event.id:>6} ", "dim"),
        (f"{local_time(event.unix_ms)} ", "dim"),
        (f"{clean(event.kind):<20} ", "bold"),
        clean(event.message, MAX_MESSAGE_CHARACTERS),
    )
