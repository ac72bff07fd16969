"""`atoll lab`: an emulated WAN on this machine. Rehearse your run before you rent."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import ExitCode
from atoll.core.output import Output, OutputOption, print_json, say

if TYPE_CHECKING:
    from atoll.node.lab.wan.check import CheckResult, Measurement

app = typer.Typer(no_args_is_help=True, help="An emulated WAN on this machine: rehearse your run before you rent.")
TopologyName = Annotated[str, typer.Argument(metavar="[TOPOLOGY]", help="A built-in topology, or a TOML file.")]


@app.command("list")
def list_(output: OutputOption = Output.TEXT) -> None:
    """The topologies that come with Atoll."""
    from atoll.node.lab.wan.topology import built_in_names, load_topology

    topologies = [load_topology(name) for name in built_in_names()]
    if output is Output.JSON:
        print_json({"topologies": [{"name": it.name, **it.to_document()} for it in topologies]})
        return
    width = max(len(it.name) for it in topologies)
    for it in topologies:
        typer.echo(f"{it.name:<{width}}  {len(it.trainers)} hosts  {it.description}")


@app.command()
def check(
    topology: TopologyName = "home-4",
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, max=60, help="How long each rate is measured.")] = 4.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Build a topology, measure every rate and distance against its setting, and remove it. Needs root.

    Ends with 1 when anything is out of tolerance: then this machine is too slow, or too busy, for that topology.
    """
    import asyncio

    from atoll.node.lab.wan.check import check_topology
    from atoll.node.lab.wan.topology import load_topology

    wanted = load_topology(topology)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # the network is removed either way
    result = asyncio.run(check_topology(wanted, seconds, say))
    if output is Output.JSON:
        print_json({"lab_check": result.to_json()})
    else:
        _print(result)
    if not result.ok:
        raise typer.Exit(ExitCode.FAILURE)


def _print(result: CheckResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "host", "peer", box=None, pad_edge=False, header_style="bold")
    for title in ("set", "measured", "allowed"):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in result.measurements:
        low, measured, high = (_value(row, value) for value in (row.low, row.measured, row.high))
        mark = "[green]✓[/]" if row.ok else "[red]✗[/]"
        table.add_row(row.quantity, row.host, row.peer, _value(row, row.set), measured, f"{low} – {high}", mark)
    console = Console(highlight=False)
    console.print(table)
    wrong = sum(not row.ok for row in result.measurements)
    console.print(
        f"\n{result.topology}: {len(result.measurements) - wrong} of {len(result.measurements)} within tolerance; "
        f"TCP {result.congestion}, goodput without headers; the hub used {result.hub_cpu_share:.0%} of a core",
        soft_wrap=True,
    )
    if result.hub_late:
        console.print(f"This machine was too busy {result.hub_late} times to carry packets in time.", soft_wrap=True)


def _value(row: Measurement, value: float) -> str:
    if row.quantity == "loss":
        return f"{max(0.0, value):.2%}"
    return f"{value:.0f}" if row.quantity == "inbound_calls" else f"{value:.1f}"
