"""`atollctl run assign` and `run clone`: another run for the same nodes, and another run from the same spec."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.coordinator.cli.client import Client, connect
from atoll.coordinator.cli.node import show_nodes
from atoll.coordinator.cli.options import CredentialsOption, NodesArgument
from atoll.coordinator.cli.several_nodes import carry_out
from atoll.core.errors import UsageError
from atoll.core.output import Output, OutputOption
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import common_pb2 as pb


def assign(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run to which the nodes move")],
    nodes: NodesArgument = None,
    all_of: Annotated[
        str, typer.Option("--all-of", metavar="RUN", help="move all connected nodes and seeds of this run")
    ] = "",
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Move nodes and seeds to another run, without new tokens. Each node first finishes its round.

    An offline node moves when it comes back. To cancel the order, assign a node to its present run.

    [bold]Examples[/bold]

      atollctl run assign kelp reef-1 reef-2

      atollctl run assign kelp --all-of reef
    """
    if bool(nodes) == bool(all_of):
        raise UsageError("say which nodes are to move", "name them, or pass --all-of RUN")
    with connect(credentials) as client:
        chosen = nodes or _connected(client, all_of)
        moved = carry_out(
            lambda node: client.call(client.stub.AssignNode, wire.AssignNodeRequest(node=node, run_id=run)),
            chosen,
            "assigned",
        )
    show_nodes(output, moved.answers)
    moved.raise_if_refused()


def _connected(client: Client, run: str) -> list[str]:
    """Peer ids of a run's connected nodes, seeds first, so that nodes learn the seeds' new run."""
    there = client.call(client.stub.ListNodes, wire.ListNodesRequest(run_id=run)).nodes
    seeds_first = sorted(there, key=lambda it: pb.ROLE_SEED not in it.roles)
    chosen = [it.peer_id for it in seeds_first if it.connected and not it.banned]
    if not chosen:
        raise UsageError(f"no node of run {run!r} is connected", "see `atollctl node list`")
    return chosen
