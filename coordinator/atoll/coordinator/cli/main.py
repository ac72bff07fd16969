"""`atollctl`, the operator's program: assembles the groups of commands, one file per group.

Nothing here imports torch, hivemind, pydantic, SQLAlchemy or a web framework, so that a command answers in
well under half a second.
"""

from __future__ import annotations

import typer

from atoll.coordinator.cli import (
    ca,
    checkpoint,
    events,
    metrics,
    node,
    node_forget,
    plan,
    run,
    run_assign,
    run_clone,
    run_credits,
    run_diff,
    run_end,
    run_fork,
    run_plan,
    token,
    trust,
)
from atoll.core.cli import run_cli
from atoll.core.output import VersionOption

app = typer.Typer(
    name="atollctl",
    help="Steer an Atoll swarm: tokens, nodes, runs, plans, proofs, certificates, checkpoints, metrics, events.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(version: VersionOption = False) -> None:
    """Steer an Atoll swarm: tokens, nodes, runs, plans, proofs, certificates, checkpoints, metrics, events."""


app.add_typer(token.app, name="token")
node.app.command()(node_forget.forget)
app.add_typer(node.app, name="node")
run.app.command("plan")(run_plan.plan_run)
run.app.command()(run_clone.clone)
run.app.command()(run_fork.fork)
run.app.command()(run_assign.assign)
run.app.command()(run_diff.diff)
run.app.command()(run_credits.credits)
run.app.command()(run_end.checkpoint)
run.app.command()(run_end.delete)
app.add_typer(run.app, name="run")
app.add_typer(plan.app, name="plan")
app.add_typer(trust.app, name="trust")
app.add_typer(ca.app, name="ca")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("metrics")(metrics.metrics)
app.command("events")(events.events)


def main() -> None:
    """Run `atollctl`."""
    run_cli(app)
