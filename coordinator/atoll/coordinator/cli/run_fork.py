"""`atollctl run fork`: a run that begins with the weights of a committed round of another run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import typer

from atoll.coordinator.cli.client import Client, connect
from atoll.coordinator.cli.options import CredentialsOption, SetOption, StartOption, UnsetOption
from atoll.coordinator.cli.run_views import show_one_run
from atoll.coordinator.cli.spec_changes import changed_spec
from atoll.coordinator.store.records import MAX_INTEGER
from atoll.core.errors import UsageError
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire

_SHOWN = 8
_HASH = re.compile("[0-9a-f]{64}")


def fork(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run whose weights the new run begins with")],
    name: Annotated[str, typer.Argument(metavar="NEW", help="name of the new run")],
    round_number: Annotated[
        int,
        typer.Option(
            "--from", metavar="ROUND", min=0, max=MAX_INTEGER, help="round of which a node holds a checkpoint"
        ),
    ],
    changes: SetOption = None,
    defaults: UnsetOption = None,
    manifest: Annotated[
        str,
        typer.Option(metavar="HASH", help="manifest hash of a round that the coordinator does not know as committed"),
    ] = "",
    start: StartOption = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Create a run that begins with the weights of a round of another run. It keeps [model] and the tokenizer.

    A fork takes only the weights. Tokens, learning rate schedule, momentum, optimizer and data start again.

    [bold]Examples[/bold]

      atollctl run fork reef kelp --from 120 --set optimizer.learning_rate=0.0002 --start
    """
    if manifest and not _HASH.fullmatch(manifest):
        raise UsageError("--manifest is not a hash: 64 hexadecimal digits", "see `atollctl checkpoint list`")
    with connect(credentials) as client:
        request = wire.ForkSourceRequest(run_id=run, round=round_number, manifest_hash=bytes.fromhex(manifest))
        source = client.call(client.stub.FindForkSource, request)
        begins: dict[str, str | int] = {
            "run": source.run_id,
            "round": source.round,
            "manifest": source.manifest_hash.hex(),
        }
        text = changed_spec(source.spec_toml, name, changes or (), defaults or (), begins)
        at_risk = _may_lose_it(client, source)
        created = client.call(client.stub.CreateRun, wire.CreateRunRequest(spec_toml=text, start=start))
    show_one_run(output, created)
    if not source.committed:
        print_to_stderr(
            "note: the coordinator does not know that this round committed; it trusts the hash that you named"
        )
    if at_risk:
        print_to_stderr(
            f"note: the nodes that hold round {source.round} hold no other checkpoint of run {source.run_id}; "
            "where `checkpoint_keep` is 1, the next one replaces it: start the fork and assign a node to it soon"
        )
    if not start:
        print_to_stderr(f"start it with: atollctl run start {created.run_id}")
    print_to_stderr(f"give it one of {_places(source.holders)}: atollctl run assign {created.run_id} NODE")


def _may_lose_it(client: Client, source: wire.ForkSourceView) -> bool:
    """True if all holders are still in the source's run, and none is known to keep more than one checkpoint."""
    if any(it.run_id != source.run_id for it in source.holders):
        return False
    held = client.call(client.stub.ListCheckpoints, wire.ListCheckpointsRequest(run_id=source.run_id)).checkpoints
    counts = Counter(it.peer_id for it in held)
    return all(counts[it.peer_id] < 2 for it in source.holders)


def _places(holders: Iterable[wire.ForkHolder]) -> str:
    """The nodes that can write genesis, connected ones first."""
    ordered = sorted(holders, key=lambda it: (not it.connected, it.node_name))
    shown = [f"{it.node_name} (run {it.run_id}{'' if it.connected else ', not connected'})" for it in ordered[:_SHOWN]]
    more = len(ordered) - len(shown)
    return "the nodes that hold the round, " + ", ".join(shown) + (f" and {more} more" if more else "")
