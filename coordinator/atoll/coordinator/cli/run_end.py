"""`atollctl run delete` and `run checkpoint`: forget a run for good, and keep what it has learned first."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from atoll.coordinator.cli.client import Client, connect
from atoll.coordinator.cli.confirmation import confirm_run
from atoll.coordinator.cli.formatting import size_or_dash
from atoll.coordinator.cli.options import CredentialsOption, RunArgument, YesOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show
from atoll.coordinator.sanitize import clean
from atoll.core.errors import DeadlineExceeded
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.core.units import duration_text, parse_duration
from atoll.v1 import admin_pb2 as wire

_POLL_SECONDS = 1.0
_DELETED_COLUMNS = [
    Column("run", "run_id"),
    Column("round", "head_round", align_right=True),
    Column("nodes", align_right=True),
    Column("join tokens", "tokens", align_right=True),
]
_CHECKPOINT_COLUMNS = [
    Column("round", align_right=True),
    Column("node"),
    Column("layers"),
    Column("bytes", align_right=True),
    Column("size", align_right=True, drop_order=1),
]


def delete(
    run: Annotated[str, typer.Argument(metavar="RUN", help="name of a run that is over, or that never started")],
    yes: YesOption = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Delete a run with its rounds, metrics, plans, proofs, events, tokens and nodes. Asks for its name.

    Bans stay. Nodes that moved to another run stay there. The other nodes need a new token to join any run.
    Files on the disks of nodes, such as checkpoints, stay there. A new run may have the name.

    [bold]Example[/bold]

      atollctl run delete reef
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetRun, wire.RunRequest(run_id=run))
        if not yes:
            what = f"this deletes all records of run {clean(view.run_id)} ({view.head_round} rounds), for good"
            confirm_run(view.run_id, what)
        deleted = client.call(client.stub.DeleteRun, wire.DeleteRunRequest(run_id=view.run_id))
    row = message_dict(deleted)
    show(output, {"deleted": row}, _DELETED_COLUMNS, [row])


def checkpoint(
    run: RunArgument = "",
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="longest time to wait")] = "10m",
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Order nodes to write a checkpoint now, and wait until all layers of one round are on their disks.

    The round is the newest one or a later one. Exits with 69 if layers are missing after the longest wait.

    [bold]Example[/bold]

      atollctl run checkpoint reef --timeout 5m && atollctl checkpoint pull --run reef --to reef-now
    """
    seconds = parse_duration(timeout).total_seconds()
    with connect(credentials) as client:
        found = _wait_for_checkpoint(client, wire.OrderCheckpointRequest(run_id=run), seconds)
    show(output, {"checkpoint": message_dict(found)}, _CHECKPOINT_COLUMNS, [_row(item) for item in found.checkpoints])


def _wait_for_checkpoint(
    client: Client, request: wire.OrderCheckpointRequest, seconds: float
) -> wire.OrderCheckpointResponse:
    """Repeat the order until it is carried out. Raises `DeadlineExceeded`."""
    end = time.monotonic() + seconds
    while True:
        found = client.call(client.stub.OrderCheckpoint, request)
        if found.written_round:
            return found
        left = end - time.monotonic()
        if left <= 0:
            raise _not_written(found, seconds)
        if not request.round:
            print_to_stderr(
                f"run {clean(found.run_id)}: waiting for a checkpoint of round {found.round} or a newer one"
            )
        request = wire.OrderCheckpointRequest(run_id=found.run_id, round=found.round)
        time.sleep(min(_POLL_SECONDS, left))


def _not_written(found: wire.OrderCheckpointResponse, seconds: float) -> DeadlineExceeded:
    waiting = f"; not written by: {', '.join(clean(name) for name in found.waiting)}" if found.waiting else ""
    return DeadlineExceeded(
        f"no checkpoint of round {found.round} or a newer one has all layers after {duration_text(seconds)}: "
        f"{clean(found.missing) or 'layers'} missing{waiting}",
        "see `atollctl checkpoint list` and the nodes' logs, then try again with a longer --timeout",
    )


def _row(item: wire.CheckpointView) -> JsonObject:
    held = item.checkpoint
    return {
        "round": held.round,
        "node": item.node_name,
        "layers": f"{held.layers.first}–{held.layers.last}",
        "bytes": held.bytes,
        "size": size_or_dash(held.bytes),
    }
