"""Options that several commands share. Every command imports this file, so it must stay cheap."""

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
        help="directory of the operator's credential; default: the one that `atoll-coordinator serve` wrote here",
    ),
]
RunOption = Annotated[
    str, typer.Option("--run", metavar="NAME", help="name of the run; needed only if there are several runs")
]
NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="node: its name, its peer id, or the end of its peer id")
]
