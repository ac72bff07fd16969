"""`atollctl plan`: show, compare, pin, apply and explain plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli import plan_change
from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.formatting import count_or_dash, local_time, size_or_dash
from atoll.coordinator.cli.options import CredentialsOption, NodeArgument, RunOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show, show_messages
from atoll.coordinator.sanitize import clean
from atoll.coordinator.store.records import MAX_INTEGER
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire

app = typer.Typer(help="Plans: show, history, diff, pin, unpin, apply, explain, what-if.", no_args_is_help=True)
VersionArgument = Annotated[int, typer.Argument(min=1, max=MAX_INTEGER)]
SvgOption = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="draw the plan as SVG into this file")]
_COPIES = Column("copy of", "copies")
_COLUMNS = [
    Column("route", align_right=True),
    Column("node"),
    Column("peer", drop_order=1),
    Column("layers"),
    _COPIES,
    Column("memory", align_right=True),
    Column("first samples", "samples", align_right=True, drop_order=3),
    Column("token cap", "cap", align_right=True, drop_order=2),
    Column("reduces", align_right=True),
]
_HISTORY_COLUMNS = [
    Column("plan", align_right=True),
    Column("issued"),
    Column("nodes", align_right=True),
    Column("routes", align_right=True),
    Column("predicted", align_right=True),
    Column("measured", align_right=True),
    Column("off by", "off", align_right=True, drop_order=1),
    Column("moved", align_right=True, drop_order=2),
    Column("why", prose=True),
]


@app.callback()
def group() -> None:
    """Plans: show, history, diff, pin, unpin, apply, explain, what-if."""


@app.command("show")
def show_plan(
    run: RunOption = "",
    version: Annotated[int, typer.Option(min=0, max=MAX_INTEGER, help="version of the plan; 0: the newest")] = 0,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show a plan: spans, routes, data, caps, and the reason for it.

    [bold]Example[/bold]

      atollctl plan show --version 3
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetPlan, wire.GetPlanRequest(run_id=run, version=version))
    document = {key: value for key, value in message_dict(view).items() if key != "plan"}
    columns = [item for item in _COLUMNS if item is not _COPIES or any(node.copies for node in view.nodes)]
    show(output, {"plan": message_dict(view.plan), **document}, columns, list(_rows(view)))
    if output is Output.TEXT:
        plan = view.plan
        print_to_stderr(
            f"plan {plan.version} of run {plan.run_id}, issued {local_time(plan.issued_unix_ms)}: {clean(plan.reason)}"
        )
        for item in view.left_out:
            print_to_stderr(f"left out: {clean(item.name or item.peer_id)}: {clean(item.reason)}")
        if view.missing:
            print_to_stderr(f"no other plan is possible now: {clean(view.missing)}")


@app.command("history")
def history(run: RunOption = "", output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Show all plans that the coordinator keeps: issue time, reason, predicted and measured speed.

    [bold]Example[/bold]

      atollctl plan history
    """
    with connect(credentials) as client:
        plans = client.call(client.stub.PlanHistory, wire.PlanHistoryRequest(run_id=run)).plans
    show_messages(output, "plans", plans, _HISTORY_COLUMNS, _line)


@app.command("diff")
def diff(
    earlier: VersionArgument,
    later: VersionArgument,
    run: RunOption = "",
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show the nodes whose layers differ between two plans.

    [bold]Example[/bold]

      atollctl plan diff 3 4
    """
    with connect(credentials) as client:
        plan_change.diff(client, run, earlier, later, output)


@app.command("pin")
def pin(
    node: NodeArgument,
    layers: Annotated[str, typer.Option(metavar="A-B", help="exactly these layers, first and last included")] = "",
    out: Annotated[bool, typer.Option("--out", help="give the node no layers")] = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Order a node to hold exactly these layers, or none, until you unpin it. A new plan follows within seconds.

    [bold]Examples[/bold]

      atollctl plan pin reef-3 --layers 0-11

      atollctl plan pin reef-4 --out
    """
    request = plan_change.pin_request(node, layers, out=out)
    with connect(credentials) as client:
        plan_change.show_pin(client.call(client.stub.PinNode, request), output)


@app.command("unpin")
def unpin(node: NodeArgument, output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Remove a node's pin, so that the planner chooses its layers again.

    [bold]Example[/bold]

      atollctl plan unpin reef-3
    """
    with connect(credentials) as client:
        plan_change.show_pin(client.call(client.stub.UnpinNode, wire.UnpinNodeRequest(node=node)), output)


@app.command("apply")
def apply(
    run: RunOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print what would change")] = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Make a plan now, without a debounce time. A plan with routes is issued only if it gains more than it costs.

    [bold]Example[/bold]

      atollctl plan apply --dry-run
    """
    with connect(credentials) as client:
        response = client.call(client.stub.ApplyPlan, wire.ApplyPlanRequest(run_id=run, dry_run=dry_run))
    plan_change.show_change(response, output, dry_run=dry_run)


@app.command("explain")
def explain_plan(
    run: RunOption = "",
    seconds: Annotated[float, typer.Option(min=0.5, max=3600, help="seconds to search for better plans")] = 5.0,
    svg: SvgOption = None,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Explain what limits the newest plan and what would help, from measurements of its nodes.

    [bold]Example[/bold]

      atollctl plan explain --svg plan.svg
    """
    from atoll.coordinator.cli.plan_explain import explain_running_plan  # imports SciPy

    with connect(credentials) as client:
        explain_running_plan(client, run, seconds, output, svg)


@app.command("what-if")
def what_if(
    topology: Annotated[
        Path, typer.Argument(help="TOML file with the machines; docs/explain/planner.md lists all fields")
    ],
    seconds: Annotated[float, typer.Option(min=0.5, max=3600, help="seconds to search for the best plan")] = 10.0,
    svg: SvgOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Make a plan for machines listed in a file; explain what limits it and what would help.

    This command needs no coordinator. Example: atollctl plan what-if rented.toml --svg rented.svg
    """
    from atoll.coordinator.cli.what_if import plan_file  # imports SciPy

    plan_file(topology, seconds, output, svg)


def _rows(view: wire.PlanView) -> Iterator[JsonObject]:
    """Rows by route and position on it, then standbys."""
    plan, nodes = view.plan, {item.peer_id: item for item in view.nodes}
    assigned = {item.peer_id: item for item in plan.assignments}
    total = sum(item.max_reduce_bytes_per_second for item in plan.assignments)
    placed = [(number, peer) for number, route in enumerate(plan.routes, 1) for peer in route.peer_ids]
    drivers = {route.peer_ids[0] for route in plan.routes}
    standbys = sorted(assigned.keys() - {peer for _, peer in placed})
    for number, peer in [*placed, *((0, peer) for peer in standbys)]:
        item, node = assigned[peer], nodes.get(peer, wire.PlacedNode())
        samples = ", ".join(f"{piece.start}–{piece.end - 1}" for piece in item.data_ranges)
        yield {
            "route": number or "standby",
            "node": node.name or "–",
            "peer": f"…{peer[-8:]}",
            "layers": f"{item.span.first}–{item.span.last}",
            "copies": ", ".join(f"{span.first}–{span.last}" for span in node.copies) or "–",
            "memory": f"{size_or_dash(node.memory_bytes)} of {size_or_dash(node.memory_lent_bytes)}",
            "samples": samples or ("from manifests" if peer in drivers else "none"),
            "cap": count_or_dash(item.max_round_tokens),
            "reduces": f"{100 * item.max_reduce_bytes_per_second / total:.0f} %" if total else "–",
        }


def _line(item: wire.PlanFigures) -> JsonObject:
    predicted, measured = item.predicted_tokens_per_second, item.measured_tokens_per_second
    return {
        "plan": item.version,
        "issued": local_time(item.issued_unix_ms),
        "nodes": item.nodes,
        "routes": item.routes,
        "predicted": count_or_dash(predicted),
        "measured": count_or_dash(measured),
        "off": f"{100 * (predicted / measured - 1):+.0f} %" if predicted and measured else "–",
        "moved": size_or_dash(item.moved_bytes),
        "why": item.reason,
    }
