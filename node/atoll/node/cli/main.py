"""Commands of a volunteer, one file each. The `atoll` program adds the lab's (`atoll.lab.cli.main`).

A command imports torch only when it runs and needs it, so that `--help` and `status` are fast.
"""

from __future__ import annotations

import typer

from atoll.core.output import VersionOption
from atoll.node.cli import (
    config_show,
    data,
    doctor,
    evaluate,
    export,
    identity,
    join,
    logs,
    pause_resume,
    set_limits,
    status,
)

app = typer.Typer(
    name="atoll",
    help="Lend this machine's GPU to a run: join with a token, then watch, pause, resume, leave.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(version: VersionOption = False) -> None:
    """Lend this machine's GPU to a run: join with a token, then watch, pause, resume, leave."""


app.command()(join.join)
app.command()(join.up)
app.command()(status.status)
app.command()(pause_resume.pause)
app.command()(pause_resume.resume)
app.command()(pause_resume.finish)
app.command()(pause_resume.leave)
app.command("set")(set_limits.set_)
app.command()(doctor.doctor)
app.command()(logs.logs)
app.command()(export.export)
app.command()(export.base)
app.command("eval")(evaluate.eval_)
app.add_typer(config_show.app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(identity.app, name="identity")
