"""Runs as a table and as facts, for the commands that show them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from atoll.coordinator.cli.formatting import count_or_dash, local_time, loss_or_dash
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show
from atoll.coordinator.sanitize import clean, enum_word
from atoll.core.output import Output
from atoll.core.units import count_text, duration_text
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import membership_pb2 as mb

_SHOWN = 8
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


def show_runs(output: Output, document: JsonObject, runs: list[wire.RunView]) -> None:
    """Print runs as `run list` does."""
    show(output, document, _COLUMNS, [_row(run) for run in runs])


def show_one_run(output: Output, run: wire.RunView) -> None:
    """Print one run as `run show` does."""
    show_runs(output, {"run": message_dict(run)}, [run])


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
    """Time until the run is finished, by the pace of its recent rounds."""
    known = run.HasField("eta_unix_ms")
    return duration_text(max(0.0, run.eta_unix_ms / 1000 - time.time())) if known else "–"


def _finish(run: wire.RunView) -> str:
    if not run.HasField("eta_unix_ms"):
        return "–"
    pace = f"{count_text(run.recent_tokens_per_second)} tokens/s"
    return f"in {_left(run)}, {local_time(run.eta_unix_ms)}, at the pace of its recent rounds: {pace}"


def run_facts(run: wire.RunView) -> list[tuple[str, object]]:
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
    """The first few texts, and the number of others, because hundreds of nodes may load at once."""
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
