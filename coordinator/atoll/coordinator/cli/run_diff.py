"""`atollctl run diff`: what differs between the specs of runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.options import CredentialsOption
from atoll.coordinator.cli.output import Column, JsonObject, show
from atoll.core.errors import UsageError
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire

MAX_RUNS = 8


def diff(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help=f"names of two to {MAX_RUNS} runs")],
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show only the keys in which the specs of runs differ.

    [bold]Example[/bold]

      atollctl run diff reef reef-half
    """
    from atoll.core.spec_difference import spec_differences  # imports pydantic

    names = list(dict.fromkeys(runs))
    if not 2 <= len(names) <= MAX_RUNS:
        raise UsageError(f"{len(names)} different runs are named; must be 2 to {MAX_RUNS}", "see `atollctl run list`")
    with connect(credentials) as client:
        specs = [client.call(client.stub.GetRun, wire.RunRequest(run_id=name)).spec_toml for name in names]
    found = {key: dict(zip(names, values, strict=True)) for key, values in spec_differences(specs).items()}
    if not found and output is Output.TEXT:
        print_to_stderr("the specs are equal, but for the names")
        return
    rows: list[JsonObject] = [
        {"key": key, **{name: _text(value) for name, value in values.items()}} for key, values in found.items()
    ]
    document = {"runs": names, "differences": found}
    show(output, document, [Column("key"), *(Column(name) for name in names)], rows)


def _text(value: object) -> str:
    """The value approximately as in TOML; a dash if the spec does not have it."""
    return "–" if value is None else json.dumps(value, ensure_ascii=False)
