"""Options that several commands share, and helpers that turn them into a configuration."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from atoll.node.config import SETTING_FIELDS, SETTING_TYPES, LoadedConfig, Value, load

Command = TypeVar("Command", bound=Callable[..., Any])

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Directory of this node's keys, manifests and anchors.", show_default=False),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file with node settings.", show_default=False)
]


def load_settings(data_dir: Path | None, config_file: Path | None, **flags: Value | None) -> LoadedConfig:
    """Load the node's configuration from defaults, files, environment and flags."""
    return load({"data_dir": data_dir, **flags}, os.environ, config_file)


def data_directory(data_dir: Path | None) -> Path:
    """Return the data directory, for commands that talk to a daemon."""
    return load_settings(data_dir, None).config.data_dir


def with_setting_options(*names: str) -> Callable[[Command], Command]:
    """Give a command one option for each named setting. It receives them as keywords; a missing option is None."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [_setting_option(name) for name in names]
        command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]  # typer reads it
        return command

    return decorate


def _setting_option(name: str) -> inspect.Parameter:
    """Derive an option from a field of `NodeConfig`: flag, type, help and default."""
    setting = SETTING_FIELDS[name]
    help_text = setting.metadata["help"]
    option = typer.Option(
        None,
        f"--{name.replace('_', '-')}",
        help=f"{help_text[0].upper()}{help_text[1:]}.",
        show_default=setting.default if isinstance(setting.default, str) and setting.default else False,
    )
    kind = SETTING_TYPES[name] | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
