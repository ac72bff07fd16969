"""`atollctl run`: create, start, inspect, pause, stop and recover training runs."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli.client import Client, connect
from atoll.coordinator.cli.confirmation import confirm, confirm_run
from atoll.coordinator.cli.formatting import count_or_dash, local_time
from atoll.coordinator.cli.options import CredentialsOption, RunArgument, SpecArgument, StartOption, YesOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show_facts, show_messages
from atoll.coordinator.cli.run_views import run_facts, show_one_run, show_runs
from atoll.coordinator.sanitize import clean
from atoll.coordinator.store.records import MAX_INTEGER
from atoll.core.errors import ConfigError, RunSpecError
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire

app = typer.Typer(
    help="Runs: plan, create, clone, fork, show, start, pause, stop, delete, recover, assign nodes.",
    no_args_is_help=True,
)
_ROUNDS = 1000  # rows a request, abandoned attempts included
_ROUND_COLUMNS = [
    Column("round", align_right=True),
    Column("attempt", align_right=True, drop_order=1),
    Column("plan", align_right=True, drop_order=2),
    Column("outcome"),
    Column("nodes", align_right=True),
    Column("present", align_right=True, drop_order=5),
    Column("partial", align_right=True, drop_order=6),
    Column("screened", align_right=True, drop_order=3),
    Column("zeroed", align_right=True, drop_order=4),
    Column("codec"),
    Column("tokens", align_right=True),
    Column("seconds", align_right=True),
    Column("when"),
]
AfterOption = Annotated[
    int | None,
    typer.Option(
        "--after",
        min=0,
        max=MAX_INTEGER,
        metavar="ROUND",
        help="show only rounds after this one",
        show_default="the newest",
    ),
]


@app.command()
def create(
    file: SpecArgument,
    start: StartOption = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Create a run from a run spec. The coordinator checks the spec and names every wrong key.

    [bold]Example[/bold]

      atollctl run create reef.toml --start
    """
    text = read_spec(file)
    request = wire.CreateRunRequest(spec_toml=text, start=start)
    with connect(credentials) as client:
        run = client.call(client.stub.CreateRun, request)
    show_one_run(output, run)
    _print_spec_notes(text)
    if not start:
        print_to_stderr(f"start it with: atollctl run start {run.run_id}")


def _print_spec_notes(text: str) -> None:
    from atoll.core.run_spec import parse_run_spec, spec_warnings  # imports pydantic

    with suppress(RunSpecError):  # the coordinator accepted the spec: its release may be newer
        for warning in spec_warnings(parse_run_spec(text)):
            print_to_stderr(f"note: {warning}")


@app.command("list")
def list_runs(output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Show all runs.

    [bold]Example[/bold]

      atollctl run list
    """
    with connect(credentials) as client:
        runs = client.call(client.stub.ListRuns, wire.ListRunsRequest()).runs
    show_runs(output, {"runs": [message_dict(run) for run in runs]}, list(runs))


@app.command("show")
def show_run(run: RunArgument = "", output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Show a run: progress, losses, layers, spec.

    [bold]Example[/bold]

      atollctl run show reef --output json
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetRun, wire.RunRequest(run_id=run))
    show_facts(output, {"run": message_dict(view)}, run_facts(view))


@app.command()
def rounds(
    run: RunArgument = "",
    after: AfterOption = None,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show how rounds ended, the newest last: members, members present at the end, parts lost.

    [bold]Example[/bold]

      atollctl run rounds --after 120
    """
    with connect(credentials) as client:
        request = wire.ListRoundsRequest(run_id=run, after_round=after or 0, limit=_ROUNDS, newest=after is None)
        found = client.call(client.stub.ListRounds, request).rounds
    show_messages(output, "rounds", found, _ROUND_COLUMNS, _round_row)
    if len(found) == _ROUNDS:
        first, last = found[0].round.number, found[-1].round.number
        print_to_stderr(f"showing rounds {first} to {last}; `--after ROUND` shows others")


@app.command()
def start(run: RunArgument = "", output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Start a run, or continue a paused run.

    [bold]Example[/bold]

      atollctl run start reef
    """
    with connect(credentials) as client:
        view = client.call(client.stub.StartRun, wire.RunRequest(run_id=run))
    show_one_run(output, view)


@app.command()
def resume(run: RunArgument = "", output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Continue a paused run. `run start` does the same.

    [bold]Example[/bold]

      atollctl run resume reef
    """
    start(run, output, credentials)


@app.command()
def pause(run: RunArgument = "", output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Pause a run: its nodes wait until `run resume`.

    [bold]Example[/bold]

      atollctl run pause
    """
    with connect(credentials) as client:
        view = client.call(client.stub.PauseRun, wire.RunRequest(run_id=run))
    show_one_run(output, view)


@app.command()
def stop(
    run: RunArgument = "",
    yes: YesOption = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """End a run for good. Nodes keep its checkpoints. The command asks you to type the run's name.

    [bold]Example[/bold]

      atollctl run stop reef
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetRun, wire.RunRequest(run_id=run))
        if not yes:
            what = f"this ends run {clean(view.run_id)} at round {view.head_round}, for good"
            confirm_run(view.run_id, what, "; `run pause` is not for good")
        view = client.call(client.stub.StopRun, wire.RunRequest(run_id=view.run_id))
    show_one_run(output, view)


@app.command()
def recover(
    run: RunArgument = "",
    yes: YesOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="recover although most seats are connected, if a lost result blocks the run")
    ] = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Continue a run from the newest state of connected nodes, after most seats are lost for good.

    Newer rounds become void, even on nodes that return later. If a majority of the seats may return, wait.

    [bold]Example[/bold]

      atollctl run recover reef
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetRun, wire.RunRequest(run_id=run))
        if not yes:
            _confirm_recovery(client, view)
        view = client.call(client.stub.RecoverRun, wire.RecoverRunRequest(run_id=view.run_id, force=force))
    show_one_run(output, view)


def _confirm_recovery(client: Client, run: wire.RunView) -> None:
    nodes = client.call(client.stub.ListNodes, wire.ListNodesRequest(run_id=run.run_id)).nodes
    found = Counter(node.status.head_round for node in nodes if node.connected and node.status.head_hash)
    held = ", ".join(f"round {number} on {found[number]}" for number in sorted(found, reverse=True)) or "nothing"
    print_to_stderr(f"run {clean(run.run_id)} is at round {run.head_round}; connected nodes hold: {held}")
    print_to_stderr("rounds newer than the newest of these become void for good, on every node")
    confirm("recover it?")


def read_spec(file: Path) -> str:
    """Read a spec from a file, or from standard input. Raises `ConfigError`."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text", "a run spec is a TOML file in UTF-8") from error


def _round_row(item: wire.RoundView) -> JsonObject:
    committed = "void" if item.void else "committed"
    return {
        "round": item.round.number,
        "attempt": item.round.attempt,
        "plan": item.round.plan_version,
        "outcome": committed if item.committed else f"abandoned: {clean(item.reason, 60)}",
        "nodes": item.members or "–",
        "present": item.present or "–",
        "partial": item.partial or "–",
        "screened": len(item.screened) or "–",
        "zeroed": item.parts_zeroed or "–",
        "codec": clean(item.codec, 8) or "–",
        "tokens": count_or_dash(item.tokens),
        # empty for a round that was learned from its manifest
        "seconds": f"{item.seconds:.1f}" if item.seconds else "–",
        "when": local_time(item.unix_ms),
    }
