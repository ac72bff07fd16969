"""`atoll base`: print the `[model]` section of a run that starts from a directory of pretrained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.core.output import print_to_stderr
from atoll.node.cli.scratch import temporary_torch_cache


def base(
    directory: Annotated[
        Path, typer.Argument(help="Directory with config.json and safetensors files.", show_default=False)
    ],
    name: Annotated[
        str, typer.Option("--name", help="Name of the repository that has these files, for other people.")
    ] = "",
) -> None:
    r"""Print the \[model] section of a run that starts from these weights. It pins every file by its digest."""
    from atoll.node.model.describe_base import describe  # here, because torch and transformers take seconds

    with temporary_torch_cache():
        text, notes = describe(directory, name)
    for note in notes:
        print_to_stderr(note)
    typer.echo(text)
