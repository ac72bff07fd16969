"""`atollctl node forget`: remove the rows of nodes that are gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from atoll.coordinator.cli.client import Client, connect
from atoll.coordinator.cli.formatting import time_ago
from atoll.coordinator.cli.options import CredentialsOption, RunOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show
from atoll.coordinator.sanitize import clean
from atoll.core.errors import Ambiguous, AtollError, InvalidTransition, NotFound, UsageError
from atoll.core.output import Output, OutputOption, ask_interactively, print_to_stderr
from atoll.v1 import admin_pb2 as wire

_MAX_DAYS = 36_500
_COLUMNS = [
    Column("name"),
    Column("peer"),
    Column("run", "run_id"),
    Column("seen", align_right=True),
    Column("banned"),
]


def forget(
    nodes: Annotated[list[str] | None, typer.Argument(metavar="[NODE]...", help="names or peer ids of nodes")] = None,
    lost_for: Annotated[
        float | None,
        typer.Option(
            "--lost-for",
            min=0,
            max=_MAX_DAYS,
            metavar="DAYS",
            help="forget all nodes that were not connected for so many days",
            show_default="none",
        ),
    ] = None,
    run: RunOption = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")] = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Remove nodes that are gone. Their contributions to rounds stay, and so do bans.

    A forgotten node that comes back is refused. It can join again with a new token, even under the same name.
    A connected node is kept. So is a node that its run may need: in the plan, or to decide the next round.

    [bold]Examples[/bold]

      atollctl node forget reef-3 reef-4

      atollctl node forget --lost-for 30
    """
    if bool(nodes) == (lost_for is not None):
        raise UsageError("say which nodes are to be forgotten", "name them, or pass --lost-for DAYS")
    if nodes and run:
        raise UsageError("--run goes with --lost-for", "leave it out: names and peer ids are looked up in all runs")
    with connect(credentials) as client:
        if lost_for is None:
            chosen = [client.call(client.stub.GetNode, wire.GetNodeRequest(node=name)) for name in nodes or ()]
        else:
            chosen = _lost(client, run, lost_for)
        chosen = list({node.peer_id: node for node in chosen}.values())
        if chosen and not yes:
            _confirm(chosen)
        forgotten, refused = _forget(client, chosen)
    if refused and not forgotten:
        raise refused[0]
    rows = [message_dict(item) for item in forgotten]
    show(output, {"forgotten": rows}, _COLUMNS, [_row(item, time.time()) for item in forgotten])
    if refused:
        raise UsageError(f"{len(refused)} of {len(chosen)} nodes were not forgotten", "see above")


def _lost(client: Client, run: str, days: float) -> list[wire.NodeView]:
    """Nodes without a connection for so many days, the longest first; those that never connected count from joining."""
    since_ms = 1000 * (time.time() - 86400 * days)
    found = client.call(client.stub.ListNodes, wire.ListNodesRequest(run_id=run)).nodes
    lost = [node for node in found if not node.connected and _last_ms(node) <= since_ms]
    return sorted(lost, key=_last_ms)


def _last_ms(node: wire.NodeView) -> int:
    return max(node.last_seen_unix_ms, node.enrolled_unix_ms)


def _confirm(chosen: Sequence[wire.NodeView]) -> None:
    for node in chosen:
        seen = time_ago(node.last_seen_unix_ms, time.time())
        print_to_stderr(f"{clean(node.name)} ({clean(node.peer_id)}) of run {clean(node.run_id)}, last seen {seen}")
    what = "this node" if len(chosen) == 1 else f"these {len(chosen)} nodes"
    if not ask_interactively(lambda: typer.confirm(f"forget {what}?", err=True)):
        raise UsageError("nothing was done", "answer yes, or pass --yes")


def _forget(client: Client, chosen: Sequence[wire.NodeView]) -> tuple[list[wire.ForgetNodeResponse], list[AtollError]]:
    forgotten: list[wire.ForgetNodeResponse] = []
    refused: list[AtollError] = []
    for node in chosen:
        try:
            forgotten.append(client.call(client.stub.ForgetNode, wire.ForgetNodeRequest(node=node.peer_id)))
        except (Ambiguous, InvalidTransition, NotFound) as error:
            refused.append(error)
            print_to_stderr(f"not forgotten: {error}")
    return forgotten, refused


def _row(item: wire.ForgetNodeResponse, now: float) -> JsonObject:
    return {
        "name": item.name,
        "peer": item.peer_id if item.banned else f"…{item.peer_id[-8:]}",  # `node unban` needs all of it
        "run_id": item.run_id,
        "seen": time_ago(item.last_seen_unix_ms, now),
        "banned": "yes" if item.banned else "no",
    }
