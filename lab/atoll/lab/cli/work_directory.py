"""The directory in which the programs of a demo or of the WAN lab run, and the options that concern it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from atoll.core.errors import UsageError
from atoll.core.files import make_private_dir

KeepOption = Annotated[
    Path | None, typer.Option("--keep", help="Keep logs, state and the model in this new directory.")
]
MinutesOption = Annotated[float, typer.Option("--minutes", min=0.1, help="Give up after this many minutes.")]


def make_work_directory(keep: Path | None, program: str) -> Path:
    """Make the directory `keep`, or a temporary one, which the caller removes. Raises `UsageError`."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix=f"atoll-{program}-"))
    if keep.exists() and any(keep.iterdir()):
        raise UsageError(f"{keep} is not empty", "pass a new directory with --keep")
    return make_private_dir(keep.resolve())
