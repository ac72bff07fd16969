"""`atollctl events`: print the event log; follow new events."""

from __future__ import annotations

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
from atoll.v1 import admin_pb2 as wire

MAX_MESSAGE_CHARACTERS = 2000


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep running and print new events")] = False,
    after: Annotated[int, typer.Option(min=0, max=MAX_INTEGER, metavar="ID", help="only events after this id")] = 0,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show the event log, the oldest first. With --output json, one object a line.

    [bold]Examples[/bold]

      atollctl events --follow

      atollctl events --after 120 --output json
    """
    console = Console(highlight=False, soft_wrap=True)
    with connect(credentials) as client:
        try:
            for event in client.stream(client.stub.Events, wire.EventsRequest(after_id=after, follow=follow)):
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
