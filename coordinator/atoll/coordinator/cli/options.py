"""Options that many commands share. Cheap to import: every command line pays for this file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CredentialsOption = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        metavar="DIR",
        envvar="ATOLL_CREDENTIALS",
        help="the operator's credential; default: where `atoll-coordinator serve` on this machine put it",
    ),
]
MAX_NUMBER = 2**62  # of versions and ids: databases keep 63 bits
RunOption = Annotated[str, typer.Option("--run", metavar="NAME", help="which run; not needed if one only is under way")]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="name, peer id, or the end of a peer id")]
