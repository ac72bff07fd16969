"""Options that many commands share. Cheap to import: every command line pays for this file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Output(StrEnum):
    """How results are printed on stdout."""

    table = "table"
    json = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="what stdout gets")]
CredentialsOption = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        metavar="DIR",
        envvar="ATOLL_CREDENTIALS",
        help="the operator's credential; default: where `atoll-coordinator serve` on this machine put it",
    ),
]
RunOption = Annotated[str, typer.Option("--run", metavar="NAME", help="which run; not needed when there is only one")]
