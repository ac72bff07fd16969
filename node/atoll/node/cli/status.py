"""`atoll status`: what the daemon on this machine does, once or as a live view."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.core.output import Output, OutputOption, print_json
from atoll.core.units import bytes_text, count_text
from atoll.node.cli.options import DataDir, data_directory
from atoll.node.control.local_client import call

if TYPE_CHECKING:
    from rich.console import RenderableType

_REFRESH_SECONDS = 1.0
_COLOURS = {"training": "green", "finished": "cyan", "paused": "yellow", "failed": "red", "draining": "yellow"}


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until Ctrl-C.")] = False,
    data_dir: DataDir = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show what this node is doing: state, pace, losses, rounds, bytes."""
    where = data_directory(data_dir)
    if output is Output.JSON:
        print_json({"status": call(where, "status")})
    elif watch:
        _watch(lambda: _view(call(where, "status")))
    else:
        from rich.console import Console

        Console().print(_view(call(where, "status")))


def _watch(draw: Any) -> None:
    from rich.live import Live

    with Live(draw(), refresh_per_second=4, screen=False) as live:
        while True:
            time.sleep(_REFRESH_SECONDS)
            live.update(draw())


def _view(it: dict[str, Any]) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table

    colour = _COLOURS.get(it["state"], "blue")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
    detail = "" if it["detail"] == it["state"] else it["detail"]
    table.add_row("state", f"[bold {colour}]{it['state']}[/]  [dim]{detail}[/]")
    table.add_row(
        "coordinator", f"{it['coordinator']} {'' if it['coordinator_connected'] else '[yellow](out of reach)[/]'}"
    )
    if "seed" not in it["roles"]:
        _training_rows(table, it)
    allowed = f" of {it['month_bytes_allowed'] / 1e9:g} GB" if it["month_bytes_allowed"] else ""
    month = f"{it['month_bytes'] / 1e9:.2f} GB{allowed} this month"
    table.add_row("other traffic", f"{bytes_text(it['other_bytes_sent'])} sent · to and from peers {month}")
    for warning in it["warnings"]:
        table.add_row("warning", f"[yellow]{warning}[/]")
    return Panel(
        table, title=f"[bold]{it['name']}[/] · run {it['run']}", subtitle=f"[dim]{it['peer_id']}[/]", expand=False
    )


def _training_rows(table: Any, it: dict[str, Any]) -> None:
    done = min(1.0, it["committed_tokens"] / max(1, it["stop_tokens"]))
    losses = f"train {it['train_loss']:.3f}" if it["train_loss"] else "train –"
    if it["validation_loss"] is not None:
        losses += f" · validation {it['validation_loss']:.3f}"
    table.add_row("progress", f"{_bar(done)} {done:6.1%}  {count_text(it['committed_tokens'])} tokens, by all nodes")
    step = f"{it['step_seconds'] * 1000:.0f} ms a step on {it['device'] or '?'}"
    pace = f"{count_text(it['tokens_per_second'])} tokens/s · {step}" if it["tokens_per_second"] else "–"
    table.add_row("pace", pace)
    table.add_row("loss", f"{losses} [dim]nats/token[/]")
    members = f"{it['members']} member{'s' * (it['members'] != 1)}"
    table.add_row("rounds", f"at {it['round']} · {members} · {it['rounds_abandoned']} abandoned here")
    if it.get("rounds_left_out"):  # a daemon of an earlier release does not say
        table.add_row("left out", f"[yellow]{it['rounds_left_out']} rounds did not take this node's whole update[/]")
    saved = it["averaging_bytes_fp32"] / it["averaging_bytes_sent"] if it["averaging_bytes_sent"] else 0
    table.add_row(
        "averaging",
        f"{bytes_text(it['averaging_bytes_sent'])} sent" + (f" · {saved:.1f}× less than fp32" if saved else ""),
    )
    if it["data_stall_seconds"] >= 1:
        table.add_row("data stall", f"{it['data_stall_seconds']:.1f} s waited for the loader")


def _bar(fraction: float, width: int = 24) -> str:
    full = round(max(0.0, min(1.0, fraction)) * width)
    return f"[green]{'━' * full}[/][dim]{'━' * (width - full)}[/]"
