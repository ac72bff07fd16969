"""`atollctl metrics`: what nodes measured in each round, as a table, CSV, JSON or TensorBoard event files."""

from __future__ import annotations

import csv
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.formatting import count_or_dash, loss_or_dash, size_or_dash
from atoll.coordinator.cli.metrics_rows import UNITS, Row, Value, Wanted, all_rows, newest_rows
from atoll.coordinator.cli.options import CredentialsOption, RunArgument
from atoll.coordinator.cli.output import Column, JsonObject, print_sentences, show, show_facts
from atoll.coordinator.cli.tensorboard_files import directory_name, event_files
from atoll.coordinator.store.records import MAX_INTEGER
from atoll.core.errors import UsageError
from atoll.core.output import Output, OutputOption, print_json_rows
from atoll.v1 import admin_pb2 as wire

TABLE_ROWS = 40
_PLACE = ("round", "node", "peer_id", "unix_ms [ms]")
_COLUMNS = [
    Column("round", align_right=True),
    Column("node"),
    Column("loss", align_right=True),
    Column("held-out", align_right=True, drop_order=3),
    Column("rate", align_right=True, drop_order=4),
    Column("tokens/s", align_right=True),
    Column("norm", align_right=True, drop_order=2),
    Column("seconds", align_right=True),
    Column("compute", align_right=True, drop_order=6),
    Column("stall", align_right=True, drop_order=5),
    Column("exchange", align_right=True, drop_order=7),
    Column("sent", align_right=True, drop_order=8),
    Column("received", align_right=True, drop_order=1),
]


def metrics(
    run: RunArgument = "",
    node: Annotated[str, typer.Option("--node", metavar="NODE", help="show only metrics of this node")] = "",
    since: Annotated[
        int,
        typer.Option("--since", min=0, max=MAX_INTEGER, metavar="ROUND", help="show only this round and later rounds"),
    ] = 0,
    as_csv: Annotated[bool, typer.Option("--csv", help="print all rows as CSV, with units in the first line")] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="write event files for TensorBoard into DIR"),
    ] = None,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show what nodes measured in each round: loss, learning rate, speed, times, bytes.

    The table shows the newest rows. CSV and JSON contain all rows that the coordinator keeps: the newest 1024 rounds in
    full, and fewer of the older ones. Losses are in nats per token. `rate` is the learning rate, and `norm` the norm of
    the node's pseudo-gradient.

    [bold]Examples[/bold]

      atollctl metrics

      atollctl metrics reef --node basement --since 100

      atollctl metrics reef --csv > reef.csv

      atollctl metrics reef --tensorboard runs && tensorboard --logdir runs
    """
    if as_csv and (output is Output.JSON or tensorboard is not None):
        other = "--tensorboard" if tensorboard is not None else "--output json"
        raise UsageError(f"--csv and {other} exclude each other", "pass one of them")
    with connect(credentials) as client:
        view = client.call(client.stub.GetRun, wire.RunRequest(run_id=run))
        held_out = {item.round: item.loss for item in view.evaluations if item.round >= since}
        wanted = Wanted(view.run_id, node, since)
        if tensorboard is not None:
            written = _write_event_files(tensorboard, wanted, all_rows(client, wanted, held_out), held_out)
            show_facts(output, {"tensorboard": written}, list(written.items()))
        elif output is Output.JSON:
            document = {"run_id": view.run_id, "units": UNITS, "validation_losses": _losses(held_out)}
            rows = all_rows(client, wanted, held_out)
            print_json_rows(document, "metrics", (row.document() for row in rows))
        elif as_csv:
            _print_csv(all_rows(client, wanted, held_out))
        else:
            _show_table(newest_rows(client, wanted, TABLE_ROWS, held_out))


def _losses(held_out: dict[int, float]) -> list[JsonObject]:
    return [{"round": number, "loss": loss} for number, loss in held_out.items()]


def _print_csv(rows: Iterable[Row]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*_PLACE, *(f"{name} [{unit}]" if unit else name for name, unit in UNITS.items())])
    for row in rows:
        values = ("" if value is None else value for value in row.values.values())
        writer.writerow([row.round, row.node, row.peer_id, row.unix_ms, *values])


def _write_event_files(
    directory: Path, wanted: Wanted, rows: Iterable[Row], held_out: Mapping[int, float]
) -> dict[str, object]:
    """Write a file for each node into RUN/NODE, and one with the run's held-out losses into RUN."""
    run, count, times = directory_name(wanted.run_id), 0, [(0, time.time())]
    with event_files(directory) as files:
        for row in rows:
            values = {name: value for name, value in row.values.items() if value is not None}
            values.pop("validation_loss", None)
            files.add(f"{run}/{directory_name(row.node)}", row.unix_ms / 1000, row.round, values)
            count += 1
            if row.round > times[-1][0]:
                times.append((row.round, row.unix_ms / 1000))
        times = times[1:] or times
        for number, loss in sorted(held_out.items()):
            at = bisect_right(times, number, key=itemgetter(0))  # losses have no times, so they get those of rounds
            files.add(run, times[max(0, at - 1)][1], number, {"validation_loss": loss})
    return {"directory": str(directory), "files": len(files.names), "rows": count, "losses": len(held_out)}


def _show_table(rows: list[Row]) -> None:
    show(Output.TEXT, {}, _COLUMNS, [_cells(row) for row in rows])
    if not rows:
        print_sentences(["No node has reported a round yet."])
    elif len(rows) == TABLE_ROWS:
        print_sentences([f"These are the newest {TABLE_ROWS} rows; --csv and --output json print all."])


def _cells(row: Row) -> JsonObject:
    values = row.values
    return {
        "round": row.round,
        "node": row.node,
        "loss": loss_or_dash(values["train_loss"] or 0.0),
        "held-out": loss_or_dash(values["validation_loss"] or 0.0),
        "rate": _digits(values["learning_rate"]),
        "tokens/s": count_or_dash(values["tokens_per_second"] or 0.0),
        "norm": _digits(values["update_norm"]),
        "seconds": _seconds(values["seconds"]),
        "compute": _seconds(values["compute_seconds"]),
        "stall": _seconds(values["stall_seconds"]),
        "exchange": _seconds(values["exchange_seconds"]),
        "sent": size_or_dash(values["bytes_sent"] or 0.0),
        "received": size_or_dash(values["bytes_received"] or 0.0),
    }


def _digits(value: Value) -> str:
    return f"{value:.3g}" if value is not None else "–"


def _seconds(value: Value) -> str:
    return f"{value:.1f}" if value is not None else "–"
