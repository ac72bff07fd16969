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
        help="directory of the operator's credential; default: the one of this machine's `atoll-coordinator serve`",
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="[RUN]", help="needed only if there are several runs")]
RunOption = Annotated[str, typer.Option("--run", metavar="NAME", help="the run; needed only if there are several")]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="name, peer id, or the end of a peer id")]
NodesArgument = Annotated[list[str] | None, typer.Argument(metavar="[NODE]...", help="names or peer ids")]
SpecArgument = Annotated[Path, typer.Argument(metavar="FILE", help="the run spec, TOML; - reads standard input")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="a key with another value, as in TOML; repeatable"),
]
UnsetOption = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="SECTION.KEY", help="a key with its default again; repeatable"),
]
StartOption = Annotated[bool, typer.Option("--start", help="also start the run")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]
