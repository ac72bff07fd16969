"""`atollctl run`: create, start, inspect, pause, stop and recover training runs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.formatting import count_or_dash, local_time, loss_or_dash
from atoll.coordinator.cli.options import CredentialsOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show, show_facts
from atoll.coordinator.sanitize import clean, enum_word
from atoll.coordinator.store.records import MAX_INTEGER
from atoll.core.errors import ConfigError, RunSpecError, UsageError
from atoll.core.output import Output, OutputOption, ask_interactively, print_to_stderr
from atoll.core.units import count_text, duration_text
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import membership_pb2 as mb

_SHOWN = 8
app = typer.Typer(
    help="Runs: plan, create, clone, fork, show, start, pause, stop, delete, recover, assign nodes.",
    no_args_is_help=True,
)
RunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="name of the run; needed only if there are several runs")
]
_COLUMNS = [
    Column("run", "run_id"),
    Column("state"),
    Column("round", align_right=True),
    Column("tokens", align_right=True),
    Column("done", align_right=True),
    Column("loss", align_right=True),
    Column("nodes", align_right=True),
    Column("plan", align_right=True, drop_order=1),
    Column("left", align_right=True),
]
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


@app.command()
def create(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="run spec in TOML; - reads standard input")],
    start: Annotated[bool, typer.Option("--start", help="start the run at once")] = False,
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
    show_runs(output, {"run": message_dict(run)}, [run])
    _print_spec_notes(text)
    if not start:
        print_to_stderr(f"start it with: atollctl run start {run.run_id}")


def _print_spec_notes(text: str) -> None:
    from atoll.core.run_spec import (
        parse_run_spec,
        spec_warnings,
    )  # imports pydantic

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
    show_facts(output, {"run": message_dict(view)}, _facts(view))


@app.command()
def rounds(
    run: RunArgument = "",
    after: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_INTEGER, metavar="ROUND", help="show only rounds after this one", show_default="the newest"
        ),
    ] = None,
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
    show(
        output, {"rounds": [message_dict(item) for item in found]}, _ROUND_COLUMNS, [_round_row(item) for item in found]
    )
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
    show_runs(output, {"run": message_dict(view)}, [view])


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
    show_runs(output, {"run": message_dict(view)}, [view])


@app.command()
def stop(
    run: RunArgument = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")] = False,
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
            print_to_stderr(f"this ends run {clean(view.run_id)} at round {view.head_round}, for good")
            if ask_interactively(lambda: typer.prompt("type the name of the run", err=True)) != view.run_id:
                raise UsageError("nothing was done", "type its name, or pass --yes; `run pause` is not for good")
        view = client.call(client.stub.StopRun, wire.RunRequest(run_id=view.run_id))
    show_runs(output, {"run": message_dict(view)}, [view])


@app.command()
def recover(
    run: RunArgument = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")] = False,
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
            nodes = client.call(client.stub.ListNodes, wire.ListNodesRequest(run_id=view.run_id)).nodes
            head_rounds = [node.status.head_round for node in nodes if node.connected and node.status.head_hash]
            print_to_stderr(
                f"run {clean(view.run_id)} is at round {view.head_round}; "
                f"connected nodes hold: {_holders_by_round(head_rounds)}"
            )
            print_to_stderr("rounds newer than the newest of these become void for good, on every node")
            if not ask_interactively(lambda: typer.confirm("recover it?", err=True)):
                raise UsageError("nothing was done", "answer yes, or pass --yes")
        view = client.call(client.stub.RecoverRun, wire.RecoverRunRequest(run_id=view.run_id, force=force))
    show_runs(output, {"run": message_dict(view)}, [view])


def _holders_by_round(rounds: list[int]) -> str:
    found = Counter(rounds)
    return ", ".join(f"round {number} on {found[number]}" for number in sorted(found, reverse=True)) or "nothing"


def read_spec(file: Path) -> str:
    """Read a spec from a file, or from standard input. Raises `ConfigError`."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text", "a run spec is a TOML file in UTF-8") from error


def show_runs(output: Output, document: JsonObject, runs: list[wire.RunView]) -> None:
    """Print runs as `run list` does."""
    show(output, document, _COLUMNS, [_row(run) for run in runs])


def _state(run: wire.RunView) -> str:
    return enum_word(mb.RunState.DESCRIPTOR, run.state)


def _row(run: wire.RunView) -> JsonObject:
    return {
        "run_id": run.run_id,
        "state": _state(run),
        "round": run.head_round or "–",
        "tokens": count_or_dash(run.committed_tokens),
        "done": f"{100 * min(1.0, run.committed_tokens / run.stop_tokens):.0f} %",
        "loss": loss_or_dash(run.validation_loss),
        "nodes": f"{run.nodes_ready} of {run.min_nodes}+",
        "plan": run.plan_version or "–",
        "left": _left(run),
    }


def _left(run: wire.RunView) -> str:
    """Time until the run is finished, at the pace of its recent rounds."""
    known = run.HasField("eta_unix_ms")
    return duration_text(max(0.0, run.eta_unix_ms / 1000 - time.time())) if known else "–"


def _finish(run: wire.RunView) -> str:
    if not run.HasField("eta_unix_ms"):
        return "–"
    pace = f"{count_text(run.recent_tokens_per_second)} tokens/s"
    return f"in {_left(run)}, {local_time(run.eta_unix_ms)}, at the pace of its recent rounds: {pace}"


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
        "seconds": f"{item.seconds:.1f}" if item.seconds else "–",  # of a round that was learned from its manifest
        "when": local_time(item.unix_ms),
    }


def _facts(run: wire.RunView) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("run", run.run_id),
        ("state", _state(run)),
        ("tokens", f"{count_or_dash(run.committed_tokens)} of {count_or_dash(run.stop_tokens)}"),
        ("finishes", _finish(run)),
        ("rounds", f"{run.rounds_committed} committed of {run.rounds_opened} opened; head {run.head_round}"),
        ("nodes", f"{run.nodes_ready} ready; {run.min_nodes} needed to begin"),
        *([("nodes not ready", _first_few(run.uncounted))] if run.uncounted else []),
        ("plan", run.plan_version or "–"),
        *([("no plan is possible", run.missing)] if run.missing else []),
        ("validation loss", _losses([(item.round, item.loss) for item in run.evaluations])),
        *_source_losses(run),
        ("layers", _layers(run)),
        ("spec", "\n" + run.spec_toml.rstrip()),
    ]
    return facts


def _first_few(words: Sequence[str]) -> str:
    """The first few texts and the number of the others; hundreds of nodes may load at once."""
    shown, more = [clean(text, 80) for text in words[:_SHOWN]], len(words) - _SHOWN
    return "; ".join(shown) + (f"; {more} more" if more > 0 else "")


def _layers(run: wire.RunView) -> str:
    rows = run.layers.layers
    frozen = sum(row.frozen_parameters for row in rows)
    frozen_text = f" trained, {count_or_dash(frozen)} frozen" if frozen else ""
    return f"{len(rows)}, {count_or_dash(sum(row.parameters for row in rows))} parameters{frozen_text}"


def _losses(curve: Sequence[tuple[int, float]]) -> str:
    """First and last of the losses by round."""
    if not curve:
        return "–"
    (first_round, first), (last_round, last) = curve[0], curve[-1]
    return f"{first:.4f} (round {first_round}) → {last:.4f} (round {last_round})"


def _source_losses(run: wire.RunView) -> Iterator[tuple[str, str]]:
    """One fact for each source of the newest evaluation that has sources."""
    newest = [item for item in run.evaluations if item.sources][-1:]
    for source in newest[0].sources if newest else ():
        name = clean(source.name, 64)
        rounds = [(item.round, {it.name: it.loss for it in item.sources}) for item in run.evaluations]
        curve = [(number, losses[source.name]) for number, losses in rounds if source.name in losses]
        trained = f", {count_or_dash(source.tokens)} tokens trained" if source.tokens else ""
        yield f"loss on {name}", f"{_losses(curve)}{trained}"
