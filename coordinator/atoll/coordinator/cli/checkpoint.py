"""`atollctl checkpoint`: list the checkpoints on nodes; download one."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.formatting import count_or_dash, local_time, size_or_dash
from atoll.coordinator.cli.options import CredentialsOption, RunOption
from atoll.coordinator.cli.output import Column, JsonObject, show_messages
from atoll.coordinator.sanitize import clean
from atoll.coordinator.store.records import MAX_INTEGER
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.v1 import admin_pb2 as wire

app = typer.Typer(help="Checkpoints: list, pull.", no_args_is_help=True)
_COLUMNS = [
    Column("round", align_right=True),
    Column("node"),
    Column("layers"),
    Column("state"),
    Column("tokens", align_right=True, drop_order=3),
    Column("size", align_right=True, drop_order=2),
    Column("written"),
    Column("manifest", drop_order=1),
    Column("committed"),
]
_STEPS = 10  # progress lines if stderr is not a terminal


@app.command("list")
def list_checkpoints(
    run: RunOption = "", output: OutputOption = Output.TEXT, credentials: CredentialsOption = None
) -> None:
    """Show which node holds which checkpoint, the newest first.

    [bold]Example[/bold]

      atollctl checkpoint list
    """
    with connect(credentials) as client:
        found = client.call(client.stub.ListCheckpoints, wire.ListCheckpointsRequest(run_id=run)).checkpoints
    show_messages(output, "checkpoints", found, _COLUMNS, _row)


@app.command()
def pull(
    to: Annotated[Path, typer.Option(metavar="DIR", help="new directory for the checkpoint")],
    round_number: Annotated[
        int,
        typer.Option(
            "--round",
            min=0,
            max=MAX_INTEGER,
            help="round to download; 0: the newest of which connected nodes hold all layers",
        ),
    ] = 0,
    node: Annotated[str, typer.Option(metavar="NODE", help="node to download from; default: any holder")] = "",
    unverified: Annotated[
        bool, typer.Option("--unverified", help="also accept a round that the coordinator does not know as committed")
    ] = False,
    run: RunOption = "",
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Download a checkpoint through the coordinator. Every layer is verified before the directory appears.

    If no node holds all layers, the result is a directory of checkpoints of one round. `atoll export` accepts it.

    [bold]Examples[/bold]

      atollctl checkpoint pull --to reef-newest

      atollctl checkpoint pull --round 120 --node reef-3 --to reef-120
    """
    from atoll.coordinator.cli import checkpoint_download

    target = to.absolute()
    checkpoint_download.refuse_existing(target)
    request = wire.PullCheckpointRequest(run_id=run, round=round_number, node=node, unverified=unverified)
    with connect(credentials) as client:
        view = client.call(client.stub.GetRun, wire.RunRequest(run_id=run))
        layers = [layer.name for layer in view.layers.layers]
        with contextlib.closing(client.stream(client.stub.PullCheckpoint, request)) as messages:
            found = checkpoint_download.receive(messages, target, view.run_id, layers, Progress())
    head = found.head
    if output is Output.JSON:
        facts = {"run_id": view.run_id, "round": head.round, "committed_tokens": head.committed_tokens}
        where = {"path": str(target), "parts": list(found.parts)}
        print_json({"checkpoint": {**facts, "manifest_hash": head.hash.hex(), **where}})
        return
    tokens = count_or_dash(head.committed_tokens)
    print_to_stderr(f"round {head.round} of run {clean(view.run_id)}, {tokens} tokens: all checksums match")
    if found.parts:
        print_to_stderr(f"assembled from nodes that hold some layers each: {', '.join(found.parts)}")
    if unverified:
        print_to_stderr("--unverified: only the signers of its manifest vouch for it; the coordinator does not")
    print(target)


class Progress:
    """Prints the download's progress on stderr: in place on a terminal, else ten lines in all."""

    def __init__(self) -> None:
        self._last_step = 0

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes have arrived."""
        step = _STEPS * 10 * done // total // (1 if sys.stderr.isatty() else 10) if total else 0
        if step == self._last_step:
            return
        self._last_step = step
        line = f"{size_or_dash(done)} of {size_or_dash(total)}"
        if sys.stderr.isatty():
            print(f"\r{line:<40}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        else:
            print_to_stderr(line)


def _row(item: wire.CheckpointView) -> JsonObject:
    held = item.checkpoint
    return {
        "round": held.round,
        "node": item.node_name,
        "layers": f"{held.layers.first}-{held.layers.last}" if held.HasField("layers") else "",
        "state": "connected" if item.connected else "offline",
        "tokens": count_or_dash(held.committed_tokens),
        "size": size_or_dash(held.bytes),
        "written": local_time(held.written_unix_ms),
        "manifest": f"{held.manifest_hash.hex()[:12]}…",
        "committed": "yes" if item.committed else "unknown",
    }
