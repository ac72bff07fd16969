"""Live view of demo and lab: nodes and their pace, the validation loss, and the bytes of averaging."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from atoll.core.units import bytes_text, count_text, duration_text
from atoll.lab.demo_watch import DemoView

_LEVELS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH, _CURVE_HEIGHT = 56, 5
_COLOURS = {
    "training": "green",
    "finished": "cyan",
    "ready": "blue",
    "catching-up": "yellow",
    "failed": "red",
    "down": "red",
}


@contextlib.contextmanager
def live_view(quiet: bool) -> Iterator[Callable[[DemoView], None]]:
    """Yield a function that shows a view: redrawn on a terminal, a line per phase elsewhere, nothing if `quiet`."""
    console = Console(stderr=True, highlight=False)
    if quiet:
        yield lambda view: None
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=False) as live:
            yield lambda view: live.update(draw(view))
    else:
        yield _Lines(console).show


class _Lines:
    """Plain progress for logs: a line for each phase, for each new loss, and for the status page."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: tuple[str, float] = ("", 0.0)
        self._page = ""
        self._told = 0

    def show(self, view: DemoView) -> None:
        if view.page != self._page:
            self._page = view.page
            self._console.print(f"[{time.monotonic() - view.started:5.0f} s] status page: {view.page}")
        for event in view.faults[self._told :]:
            self._console.print(f"[{time.monotonic() - view.started:5.0f} s] {event}")
        self._told = len(view.faults)
        now = (view.phase, view.losses[-1][1] if view.losses else 0.0)
        if now != self._last:
            self._last = now
            at = f": round {view.rounds_committed}" if view.rounds_committed else ""
            loss = f", validation loss {view.losses[-1][1]:.3f}" if view.losses else ""
            self._console.print(f"[{time.monotonic() - view.started:5.0f} s] {view.phase}{at}{loss}")


def draw(view: DemoView) -> RenderableType:
    """Draw the view as a panel."""
    elapsed = duration_text(time.monotonic() - view.started)
    parts: list[RenderableType] = [_nodes(view)]
    if view.losses:
        parts += [Text(), _curve(view.losses)]
    if view.stop_tokens:
        parts += [Text(), _facts(view)]
    if view.faults:
        parts.append(Text.from_markup(f"[red]{' · '.join(view.faults)}[/]"))
    title, page = f"[bold]{view.title}[/] · {view.phase} · {elapsed}", f"[dim]{view.page}[/]" if view.page else None
    return Panel(Group(*parts), title=title, subtitle=page)


def _nodes(view: DemoView) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")  # fits 80 columns
    for title in ("node", "state", "pace", "steps", "tokens/s", "train loss", "round", "sent"):
        table.add_column(title, justify="left" if title in ("node", "state") else "right", no_wrap=True)
    fastest = max((node.get("tokens_per_second", 0) for node in view.nodes.values()), default=0)
    for name, node in view.nodes.items():
        if not node:
            table.add_row(name, "[dim]starting[/]")
            continue
        table.add_row(name, *_cells(node, fastest))
    return table


def _cells(node: dict[str, Any], fastest: float) -> list[str]:
    colour = _COLOURS.get(node["state"], "white")
    pace = node["tokens_per_second"] / fastest if fastest else 0
    return [
        f"[{colour}]{node['state']}[/]",
        f"{pace:.2f}×" if pace else "–",
        str(node["steps"]),
        count_text(node["tokens_per_second"]),
        f"{node['train_loss']:.3f}" if node["train_loss"] else "–",
        str(node["round"]),
        bytes_text(node["averaging_bytes_sent"]),
    ]


def _facts(view: DemoView) -> Text:
    nodes = [node for node in view.nodes.values() if node]
    sent = sum(node["averaging_bytes_sent"] for node in nodes)
    fp32 = sum(node["averaging_bytes_fp32"] for node in nodes)
    committed = max((node["committed_tokens"] for node in nodes), default=0)
    pace = sum(node["tokens_per_second"] for node in nodes)
    share = min(1.0, committed / max(1, view.stop_tokens))
    now = f" · {count_text(pace)} tokens/s" if pace else ""
    left = f", {duration_text((view.stop_tokens - committed) / pace)} left" if pace and share < 1 else ""
    text = Text.from_markup(
        f"[bold]{share:4.0%}[/] of {count_text(view.stop_tokens)} tokens{now}{left} · "
        f"rounds {view.rounds_committed}/{view.rounds_opened} · {bytes_text(sent)} on the wire"
    )
    if sent and fp32:
        text.append_text(Text.from_markup(f" · [bold]{fp32 / sent:.1f}×[/] less than fp32"))
    return text


def _curve(losses: list[tuple[int, float]]) -> Group:
    """Draw the validation loss over committed tokens with block characters."""
    columns = _resample([loss for _, loss in losses], _CURVE_WIDTH)
    low, high = min(columns), max(columns)
    scale = (_CURVE_HEIGHT * 8 - 1) / (high - low) if high > low else 0.0
    heights = [1 + round((value - low) * scale) for value in columns]
    rows = []
    for row in range(_CURVE_HEIGHT - 1, -1, -1):
        cells = "".join(_cell(height - row * 8) for height in heights)
        label = {_CURVE_HEIGHT - 1: f"{high:5.2f}", 0: f"{low:5.2f}"}.get(row, " " * 5)
        rows.append(Text.assemble((f"  {label} ", "dim"), (cells, "cyan")))
    title = Text.from_markup(f"  [dim]validation loss, nats per byte: now[/] [bold]{losses[-1][1]:.3f}[/]")
    return Group(title, *rows)


def _cell(eighths: int) -> str:
    return " " if eighths <= 0 else _LEVELS[min(8, eighths) - 1]


def _resample(values: list[float], width: int) -> list[float]:
    if len(values) == 1:
        return values * width
    return [values[min(len(values) - 1, i * len(values) // width)] for i in range(width)]
