"""`atoll config show`: print every setting and the origin of its value."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from atoll.core.output import Output, OutputOption, print_json
from atoll.core.toml_text import toml_value
from atoll.node.cli.options import ConfigFile, DataDir, load_settings

app = typer.Typer(help="Show this node's settings.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Show this node's settings."""


@app.command()
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Also print the source of each value.")] = False,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print the settings that `atoll join` and `atoll up` would use, as TOML that --config reads."""
    loaded = load_settings(data_dir, config)
    values = {key: str(value) if key == "data_dir" else value for key, value in asdict(loaded.config).items()}
    if output is Output.JSON:
        rows = {
            key: {"value": value, "origin": loaded.origin[key]} if origin else value for key, value in values.items()
        }
        print_json({"config": rows})
        return
    for key, value in values.items():
        line = f"{key} = {toml_value(value)}"
        typer.echo(f"{line:<56} # {loaded.origin[key]}" if origin else line)
