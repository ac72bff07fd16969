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
RunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="name of the run; needed only if there are several runs")
]
RunOption = Annotated[
    str, typer.Option("--run", metavar="NAME", help="name of the run; needed only if there are several runs")
]
NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="node: its name, its peer id, or the end of its peer id")
]
NodesArgument = Annotated[list[str] | None, typer.Argument(metavar="[NODE]...", help="names or peer ids of nodes")]
SpecArgument = Annotated[Path, typer.Argument(metavar="FILE", help="run spec in TOML; - reads standard input")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="set a key to another value, as in TOML; repeatable"),
]
UnsetOption = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="SECTION.KEY", help="reset a key to its default; repeatable"),
]
StartOption = Annotated[bool, typer.Option("--start", help="start the run at once")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")]
