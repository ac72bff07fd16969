"""`atoll base`: a directory of pretrained weights as the `[model]` section of a run that starts from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.core.output import print_to_stderr
from atoll.node.cli.scratch import temporary_torch_cache


def base(
    directory: Annotated[Path, typer.Argument(help="With config.json and safetensors.", show_default=False)],
    name: Annotated[str, typer.Option("--name", help="Where others get it, for people: a repository's name.")] = "",
) -> None:
    r"""Print the \[model] section of a run that starts from a directory's weights, every file pinned by its digest."""
    from atoll.node.model.describe_base import describe  # takes seconds: torch, transformers

    with temporary_torch_cache():
        text, notes = describe(directory, name)
    for note in notes:
        print_to_stderr(note)
    typer.echo(text)
