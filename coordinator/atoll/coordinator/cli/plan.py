"""`atollctl plan`: who trains what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.options import MAX_NUMBER, CredentialsOption, RunOption
from atoll.coordinator.cli.output import Column, Plain, plain, show
from atoll.coordinator.cli.words import count, moment
from atoll.coordinator.text import clean
from atoll.core.output import Output, OutputOption, say
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import plan_pb2

app = typer.Typer(help="Plans: show, explain, what-if.", no_args_is_help=True)
_COLUMNS = [
    Column("peer", "peer_id"),
    Column("layers"),
    Column("first samples", "samples", right=True),
    Column("token cap", "cap", right=True),
    Column("reduces", right=True),
    Column("route", right=True),
]


@app.callback()
def group() -> None:
    """Plans: show, explain, what-if."""


@app.command("show")
def show_plan(
    run: RunOption = "",
    version: Annotated[int, typer.Option(min=0, max=MAX_NUMBER, help="0: the newest")] = 0,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show a plan: spans, routes, data, caps, and why it was made.

    [bold]Example[/bold]

      atollctl plan show --version 3
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetPlan, wire.GetPlanRequest(run_id=run, version=version))
    plan = view.plan
    rows = [_row(plan, item) for item in plan.assignments]
    show(output, {"plan": plain(plan), "signed": plain(view.signed)}, _COLUMNS, rows)
    if output is Output.TEXT:
        say(f"plan {plan.version} of run {plan.run_id}, issued {moment(plan.issued_unix_ms)}: {clean(plan.reason)}")


@app.command("explain")
def explain_plan(
    run: RunOption = "",
    seconds: Annotated[float, typer.Option(min=0.5, max=3600, help="how long to look for better ones")] = 5.0,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Say what limits the plan that a run follows, and what would help, from what its nodes measured.

    [bold]Example[/bold]

      atollctl plan explain
    """
    from atoll.coordinator.cli.plan_explain import tell  # SciPy: other commands need not wait for it

    with connect(credentials) as client:
        tell(client, run, seconds, output)


@app.command("what-if")
def what_if(
    topology: Annotated[Path, typer.Argument(help="a TOML file; docs/explain/planner.md lists every field")],
    seconds: Annotated[float, typer.Option(min=0.5, max=3600, help="how long to search")] = 10.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Plan for machines that one does not own yet, and say what limits them and what would help.

    Asks no coordinator. Example: atollctl plan what-if rented.toml
    """
    from atoll.coordinator.cli.what_if import tell  # SciPy: other commands need not wait for it

    tell(topology, seconds, output)


def _row(plan: plan_pb2.Plan, item: plan_pb2.Assignment) -> Plain:
    samples = ", ".join(f"{piece.start}–{piece.end - 1}" for piece in item.data_ranges)
    total = sum(other.max_reduce_bytes_per_second for other in plan.assignments)
    routes = [str(number + 1) for number, route in enumerate(plan.routes) if item.peer_id in route.peer_ids]
    return {
        "peer_id": item.peer_id,
        "layers": f"{item.span.first}–{item.span.last}",
        "samples": samples or "from manifests",
        "cap": count(item.max_round_tokens),
        "reduces": f"{100 * item.max_reduce_bytes_per_second / total:.0f} %" if total else "–",
        "route": ", ".join(routes),
    }
