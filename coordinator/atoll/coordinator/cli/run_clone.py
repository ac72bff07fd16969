"""`atollctl run clone`: another run from the same spec."""

from __future__ import annotations

import tomllib
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.options import CredentialsOption, SetOption, StartOption, UnsetOption
from atoll.coordinator.cli.run_views import show_one_run
from atoll.coordinator.cli.spec_changes import changed_spec
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire


def clone(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run whose spec is copied")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the new run")],
    changes: SetOption = None,
    defaults: UnsetOption = None,
    start: StartOption = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Create a run from the spec of another run, with some keys changed. It begins with new weights.

    A clone of a fork begins with the same weights as the fork, unless you add --unset fork.

    A stored spec contains all defaults, so the clone keeps every value that you do not change.

    [bold]Examples[/bold]

      atollctl run clone reef kelp --set optimizer.weight_decay=0.1 --start

      atollctl run clone reef kelp --set optimizer.name=adamw --unset optimizer.learning_rate
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetRun, wire.RunRequest(run_id=run))
        text = changed_spec(view.spec_toml, name, changes or (), defaults or ())
        created = client.call(client.stub.CreateRun, wire.CreateRunRequest(spec_toml=text, start=start))
    show_one_run(output, created)
    if not start:
        print_to_stderr(f"start it with: atollctl run start {created.run_id}")
    fork = tomllib.loads(created.spec_toml).get("fork")
    if fork is not None:
        begins = f"round {fork['round']} of run {fork['run']}"
        print_to_stderr(f"note: it begins with the weights of {begins}, as run {view.run_id}; not with --unset fork")
    print_to_stderr(f"give it nodes with: atollctl run assign {created.run_id} --all-of {view.run_id}")
