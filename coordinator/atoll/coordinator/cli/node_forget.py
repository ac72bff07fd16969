"""`atollctl node forget`: remove the rows of nodes that are gone."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Annotated

import typer

from atoll.coordinator.cli.client import Client, connect
from atoll.coordinator.cli.confirmation import confirm
from atoll.coordinator.cli.formatting import time_ago
from atoll.coordinator.cli.options import CredentialsOption, NodesArgument, RunOption, YesOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show
from atoll.coordinator.cli.several_nodes import carry_out
from atoll.coordinator.sanitize import clean
from atoll.core.errors import UsageError
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire

_MAX_DAYS = 36_500
_COLUMNS = [
    Column("name"),
    Column("peer"),
    Column("run", "run_id"),
    Column("seen", align_right=True),
    Column("banned"),
]
LostForOption = Annotated[
    float | None,
    typer.Option(
        "--lost-for",
        min=0,
        max=_MAX_DAYS,
        metavar="DAYS",
        help="forget all nodes that were not connected for so many days",
        show_default="none",
    ),
]


def forget(
    nodes: NodesArgument = None,
    lost_for: LostForOption = None,
    run: RunOption = "",
    yes: YesOption = False,
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
        chosen = _lost(client, run, lost_for) if lost_for is not None else _named(client, nodes or ())
        if chosen and not yes:
            _confirm(chosen.values())
        forgotten = carry_out(
            lambda peer: client.call(client.stub.ForgetNode, wire.ForgetNodeRequest(node=peer)), chosen, "forgotten"
        )
    rows = [message_dict(item) for item in forgotten.answers]
    show(output, {"forgotten": rows}, _COLUMNS, [_row(item, time.time()) for item in forgotten.answers])
    forgotten.raise_if_refused()


def _named(client: Client, names: Iterable[str]) -> dict[str, wire.NodeView]:
    """The nodes of these names or peer ids, by peer id."""
    found = [client.call(client.stub.GetNode, wire.GetNodeRequest(node=name)) for name in names]
    return {node.peer_id: node for node in found}


def _lost(client: Client, run: str, days: float) -> dict[str, wire.NodeView]:
    """Nodes disconnected for so many days, the longest first; one that never connected counts from its joining."""
    since_ms = 1000 * (time.time() - 86400 * days)
    found = client.call(client.stub.ListNodes, wire.ListNodesRequest(run_id=run)).nodes
    lost = [node for node in found if not node.connected and _last_ms(node) <= since_ms]
    return {node.peer_id: node for node in sorted(lost, key=_last_ms)}


def _last_ms(node: wire.NodeView) -> int:
    return max(node.last_seen_unix_ms, node.enrolled_unix_ms)


def _confirm(chosen: Collection[wire.NodeView]) -> None:
    for node in chosen:
        seen = time_ago(node.last_seen_unix_ms, time.time())
        print_to_stderr(f"{clean(node.name)} ({clean(node.peer_id)}) of run {clean(node.run_id)}, last seen {seen}")
    what = "this node" if len(chosen) == 1 else f"these {len(chosen)} nodes"
    confirm(f"forget {what}?")


def _row(item: wire.ForgetNodeResponse, now: float) -> JsonObject:
    return {
        "name": item.name,
        "peer": item.peer_id if item.banned else f"…{item.peer_id[-8:]}",  # `node unban` needs the whole peer id
        "run_id": item.run_id,
        "seen": time_ago(item.last_seen_unix_ms, now),
        "banned": "yes" if item.banned else "no",
    }
