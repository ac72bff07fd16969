"""Options that several commands share, and helpers that turn them into a configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from atoll.node.config import LoadedConfig, Value, load

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
