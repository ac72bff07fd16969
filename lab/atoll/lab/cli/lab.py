"""`atoll lab`: an emulated WAN on this machine, to rehearse a run before renting machines."""

from __future__ import annotations

import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import ConfigError, ExitCode
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.core.units import count_text
from atoll.lab.cli.work_directory import KeepOption, MinutesOption, make_work_directory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from atoll.lab.wan.check import CheckResult, Measurement
    from atoll.lab.wan.run import LabRunResult

app = typer.Typer(
    no_args_is_help=True, help="Emulate a WAN on this machine, to rehearse a run before you rent machines."
)
TopologyName = Annotated[str, typer.Argument(metavar="[TOPOLOGY]", help="A built-in topology or a TOML file.")]


@app.command("list")
def list_(output: OutputOption = Output.TEXT) -> None:
    """List the built-in topologies."""
    from atoll.lab.wan.topology import built_in_names, load_topology

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
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.5, max=60, help="Duration of each rate measurement.")
    ] = 4.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Build a topology, compare all measured rates and round trips with their settings, and remove it. Needs root.

    Exits with 1 if a measurement is out of tolerance. Then this machine is too slow or busy for the topology.
    """
    import asyncio

    from atoll.lab.wan.check import check_topology
    from atoll.lab.wan.topology import load_topology
    from atoll.node.system import child_processes

    wanted = load_topology(topology)
    child_processes.treat_sigterm_as_sigint()
    result = asyncio.run(check_topology(wanted, seconds, print_to_stderr))
    if output is Output.JSON:
        print_json({"lab_check": result.to_json()})
    else:
        _print_check(result)
    if not result.ok:
        raise typer.Exit(ExitCode.FAILURE)


@app.command()
def run(
    topology: TopologyName = "home-4",
    spec: Annotated[
        Path | None, typer.Option("--run", help="Your run spec; default: the demo's model and text.")
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Committed tokens at which the demo's run stops.")
    ] = 200_000,
    codec: Annotated[
        str, typer.Option("--codec", help="Codec of the demo's run: fp32, bf16, fp16, int8, int4, int2, or auto.")
    ] = "int8",
    step_seconds: Annotated[
        float,
        typer.Option(
            "--step-seconds", min=0, help="Shortest inner step of a full-speed node, in seconds; 0: no limit."
        ),
    ] = 0.0,
    keep: KeepOption = None,
    minutes: MinutesOption = 30.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Start coordinator, seed and nodes on the hosts of a topology, and train. The command needs root.

    The speed of a host in the topology sets the pace of its node. The result shows tokens per second, and the share of
    the time in which nodes computed and did not wait for the network.
    """
    import asyncio

    from atoll.core.run_spec import check_codec
    from atoll.lab.demo_view import live_view
    from atoll.lab.wan.run import LabRunOptions, run_lab
    from atoll.lab.wan.topology import load_topology
    from atoll.node.system import child_processes

    check_codec(codec)
    text = _read(spec) if spec is not None else None
    options = LabRunOptions(load_topology(topology), text, tokens, codec, step_seconds, timedelta(minutes=minutes))
    root = make_work_directory(keep, "lab")
    child_processes.treat_sigterm_as_sigint()
    try:
        with live_view(quiet=output is Output.JSON and not sys.stderr.isatty()) as show:
            result = asyncio.run(run_lab(options, root, show))
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)
    if output is Output.JSON:
        print_json({"lab_run": result.to_json()})
    else:
        _print_run(result)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the run spec {path}: {error}") from error


def _print_run(it: LabRunResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("host", "speed", "steps", "rounds", "computing", "sent MB", "received MB", "dropped"):
        table.add_column(title, justify="left" if title == "host" else "right")
    for host in it.hosts:
        table.add_row(
            host.name, f"{host.speed:g}", str(host.steps), str(host.rounds_committed), f"{host.utilisation:.0%}",
            f"{host.sent_megabytes:.1f}", f"{host.received_megabytes:.1f}", str(host.segments_dropped),
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    equal = "[green]equal bit for bit[/]" if it.anchors_equal else "[red]DIFFER[/]"
    console.print(
        f"\n[bold]{it.topology}: {count_text(it.tokens)} tokens in {it.seconds:.0f} s, "
        f"{count_text(it.tokens_per_second)} tokens/s, {it.utilisation:.0%} of the time computing[/]\n"
        f"  validation loss {it.val_loss_first:.3f} → {it.val_loss_last:.3f}; anchors {equal}; "
        f"rounds {it.rounds_committed} of {it.rounds_opened}\n"
        f"  the seed sent {it.seed_megabytes:.1f} MB, including relayed traffic; "
        f"the hub used {it.hub_cpu_share:.0%} of a core",
        soft_wrap=True,
    )
    _warn(console, it.hub_late)


def _warn(console: Console, late: int) -> None:
    if late:
        times = "once" if late == 1 else f"{late} times"
        console.print(f"This machine was too busy {times} to carry packets in time.", soft_wrap=True)


def _check_table(result: CheckResult) -> Table:
    from rich.table import Table

    table = Table("what", "host", "peer", box=None, pad_edge=False, header_style="bold")
    for title in ("set", "measured", "allowed"):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in result.measurements:
        low, measured, high = (_value(row, value) for value in (row.low, row.measured, row.high))
        mark = "[green]✓[/]" if row.ok else "[red]✗[/]"
        table.add_row(row.quantity, row.host, row.peer, _value(row, row.set), measured, f"{low} – {high}", mark)
    return table


def _print_check(result: CheckResult) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_check_table(result))
    wrong = sum(not row.ok for row in result.measurements)
    console.print(
        f"\n{result.topology}: {len(result.measurements) - wrong} of {len(result.measurements)} within tolerance; "
        f"TCP {result.congestion}, rates without headers; the hub used {result.hub_cpu_share:.0%} of a core",
        soft_wrap=True,
    )
    _warn(console, result.hub_late)


def _value(row: Measurement, value: float) -> str:
    if row.quantity == "loss":
        return f"{max(0.0, value):.2%}"
    return f"{value:.0f}" if row.quantity == "inbound_calls" else f"{value:.1f}"
