"""`atoll status`: show the state of the daemon on this machine, once or as a live view."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.core.output import Output, OutputOption, print_json
from atoll.core.units import bytes_text, count_text, duration_text
from atoll.node.cli.options import DataDir, data_directory
from atoll.node.control.local_client import call

if TYPE_CHECKING:
    from rich.console import RenderableType

_REFRESH_SECONDS = 1.0
_MIRRORS_SHOWN = 5
_PLACES = {"cache": "this disk's cache", "directory": "--data", "server": "mirrors", "members": "members"}
_COLOURS = {"training": "green", "finished": "cyan", "paused": "yellow", "failed": "red", "draining": "yellow"}


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    data_dir: DataDir = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show this node's state, speed, losses, rounds and traffic."""
    where = data_directory(data_dir)
    if output is Output.JSON:
        print_json({"status": call(where, "status")})
    elif watch:
        _watch(lambda: _view(call(where, "status")))
    else:
        from rich.console import Console

        Console().print(_view(call(where, "status")))


def _watch(draw: Callable[[], RenderableType]) -> None:
    from rich.live import Live

    with Live(draw(), refresh_per_second=4, screen=False) as live:
        while True:
            time.sleep(_REFRESH_SECONDS)
            live.update(draw())


def _view(report: dict[str, Any]) -> RenderableType:
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    colour = _COLOURS.get(report["state"], "blue")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
    detail = "" if report["detail"] == report["state"] else report["detail"]
    table.add_row("state", f"[bold {colour}]{report['state']}[/]  [dim]{detail}[/]")
    table.add_row(
        "coordinator",
        f"{report['coordinator']} {'' if report['coordinator_connected'] else '[yellow](out of reach)[/]'}",
    )
    if "seed" not in report["roles"]:
        _training_rows(table, report)
    allowed = f" of {report['month_bytes_allowed'] / 1e9:g} GB" if report["month_bytes_allowed"] else ""
    month = f"{report['month_bytes'] / 1e9:.2f} GB{allowed} this month"
    table.add_row("other traffic", f"{bytes_text(report['other_bytes_sent'])} sent · to and from peers {month}")
    for warning in report["warnings"]:
        table.add_row("warning", f"[yellow]{escape(warning)}[/]")
    return Panel(
        table,
        title=f"[bold]{report['name']}[/] · run {report['run']}",
        subtitle=f"[dim]{report['peer_id']}[/]",
        expand=False,
    )


def _training_rows(table: Any, report: dict[str, Any]) -> None:
    done = min(1.0, report["committed_tokens"] / max(1, report["stop_tokens"]))
    losses = f"train {report['train_loss']:.3f}" if report["train_loss"] else "train –"
    if report["validation_loss"] is not None:
        losses += f" · validation {report['validation_loss']:.3f}"
    table.add_row(
        "progress", f"{_bar(done)} {done:6.1%}  {count_text(report['committed_tokens'])} tokens, by all nodes"
    )
    table.add_row("finishes", _finish(report.get("eta_unix_ms")))
    step = f"{report['step_seconds'] * 1000:.0f} ms a step on {report['device'] or '?'}"
    pace = f"{count_text(report['tokens_per_second'])} tokens/s · {step}" if report["tokens_per_second"] else "–"
    table.add_row("pace", pace)
    table.add_row("loss", f"{losses} [dim]nats/token[/]")
    members = f"{report['members']} member{'s' * (report['members'] != 1)}"
    table.add_row("rounds", f"at {report['round']} · {members} · {report['rounds_abandoned']} abandoned here")
    if report.get("rounds_left_out"):  # a daemon of an earlier release does not report it
        table.add_row("left out", f"[yellow]{report['rounds_left_out']} rounds did not use this node's whole update[/]")
    table.add_row("credit", _credit(report.get("credit")))
    saved = report["averaging_bytes_fp32"] / report["averaging_bytes_sent"] if report["averaging_bytes_sent"] else 0
    table.add_row(
        "averaging",
        f"{bytes_text(report['averaging_bytes_sent'])} sent" + (f" · {saved:.1f}× less than fp32" if saved else ""),
    )
    _text_rows(table, report)


def _text_rows(table: Any, report: dict[str, Any]) -> None:
    """The sources of the training text. A daemon of an earlier release reports fewer of them."""
    from rich.markup import escape

    if report.get("data_bytes_fetched"):
        told = [f"{bytes_text(report['data_bytes_fetched'])} fetched"]
        if report.get("data_fetched_per_trained") is not None:
            told.append(f"{report['data_fetched_per_trained']:.2f} × what was trained")
        table.add_row("text", " · ".join([*told, *_block_shares(report.get("data_blocks", {}))]))
    if report["data_stall_seconds"] >= 1:
        share = f"{report['data_stall_share']:.1%} of recent training time · " if "data_stall_share" in report else ""
        table.add_row("data stall", f"{share}{report['data_stall_seconds']:.1f} s waited for training text")
    for source in report.get("sources", []):
        cells = []
        if "tokens" in source:
            cells.append(f"{count_text(source['tokens'])} tokens · {source['epochs']:.2f} epochs")
            cells.append(f"{source['share']:.1%} of what was trained, {source['share_wanted']:.1%} wanted")
        if "validation_loss" in source:
            cells.append(f"validation {source['validation_loss']:.3f}")
        table.add_row(f"source {escape(source['name'])}", " · ".join(cells))
    failing = [mirror for mirror in report.get("data_mirrors", []) if mirror["problem"]]
    for mirror in failing[:_MIRRORS_SHOWN]:
        table.add_row("mirror", f"[yellow]{escape(mirror['problem'])}[/]")
    if len(failing) > _MIRRORS_SHOWN:
        table.add_row("mirror", f"[yellow]{len(failing) - _MIRRORS_SHOWN} more fail: --output json[/]")


def _block_shares(blocks: dict[str, int]) -> list[str]:
    """Return the shares of blocks by place, if there are several places."""
    total, told = sum(blocks.values()), []
    for place, name in _PLACES.items():
        if blocks.get(place):
            told.append(f"{blocks[place] / total:.0%} from {name}")
    return [f"blocks: {', '.join(told)}"] if told else []


def _credit(credit: dict[str, int] | None) -> str:
    """The node's contribution that committed rounds count, also before its last restart."""
    if credit is None:
        return "–"
    rounds = f"{credit['rounds']} round{'s' * (credit['rounds'] != 1)}"
    return f"{count_text(credit['tokens'])} tokens in {rounds} · rank {credit['rank']} of {credit['nodes']}"


def _finish(eta_unix_ms: int | None) -> str:
    """Return when the run will be finished. A daemon of an earlier release does not report it."""
    if eta_unix_ms is None:
        return "–"
    return f"in {duration_text(max(0.0, eta_unix_ms / 1000 - time.time()))}, at the pace of the recent rounds"


def _bar(fraction: float, width: int = 24) -> str:
    full = round(max(0.0, min(1.0, fraction)) * width)
    return f"[green]{'━' * full}[/][dim]{'━' * (width - full)}[/]"
