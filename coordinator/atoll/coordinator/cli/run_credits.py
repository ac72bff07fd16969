"""`atollctl run credits`: what each node contributed to a run."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.formatting import count_or_dash, local_time
from atoll.coordinator.cli.options import CredentialsOption, RunArgument
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire

_COLUMNS = [
    Column("rank", align_right=True),
    Column("node"),
    Column("tokens", align_right=True),
    Column("share", align_right=True),
    Column("rounds", align_right=True),
    Column("first", drop_order=2),
    Column("last", drop_order=1),
]


def credits(
    run: RunArgument = "",
    top: Annotated[int, typer.Option(min=1, max=10_000, help="number of nodes to show")] = 50,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show what each node contributed to a run, the most tokens first. The numbers survive restarts and new keys.

    They come from the manifests of committed rounds. Tokens of nodes on probation do not count. Nodes that left keep
    their place. The last row is the sum of all nodes that were forgotten.

    [bold]Examples[/bold]

      atollctl run credits reef --top 10

      atollctl run credits reef -o json
    """
    with connect(credentials) as client:
        found = client.call(client.stub.ListCredits, wire.ListCreditsRequest(run_id=run, limit=top))
    document = {
        "run": found.run_id,
        "tokens": found.tokens,
        "nodes": found.nodes,
        "credits": [message_dict(item) for item in found.credits],
    }
    show(output, document, _COLUMNS, [_row(item, found.tokens) for item in found.credits])
    if found.nodes > top:
        print_to_stderr(f"showing {top} of {found.nodes} nodes; `--top` shows more")


def _row(item: wire.CreditView, tokens: int) -> JsonObject:
    return {
        "rank": item.rank or "–",
        "node": (item.name or f"…{item.peer_id[-6:]}") if item.peer_id else "forgotten nodes",
        "tokens": count_or_dash(item.tokens),
        "share": f"{100 * item.tokens / tokens:.1f} %" if tokens else "–",
        "rounds": item.rounds,
        "first": local_time(item.first_unix_ms),
        "last": local_time(item.last_unix_ms),
    }
