"""`atollctl token`: create, list and revoke join tokens."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.formatting import time_until
from atoll.coordinator.cli.options import CredentialsOption, RunOption
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show, show_messages
from atoll.coordinator.sanitize import enum_word
from atoll.core.errors import UsageError
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.core.units import duration_text, parse_duration
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import common_pb2 as pb

app = typer.Typer(help="Join tokens: create, list, revoke.", no_args_is_help=True)
MAX_USES = 100_000  # equal to the coordinator's limit
_ROLES = {"node": pb.ROLE_NODE, "seed": pb.ROLE_SEED}
_COLUMNS = [
    Column("id"),
    Column("run", "run_id"),
    Column("admits", "admits"),
    Column("uses left", "uses", align_right=True),
    Column("expires", "expires"),
    Column("state", "state"),
]


@app.command()
def create(
    run: RunOption = "",
    uses: Annotated[int, typer.Option(min=1, max=MAX_USES, help="number of nodes that the token admits")] = 1,
    ttl: Annotated[str, typer.Option(metavar="DURATION", help="lifetime of the token: 30m, 2h, 1d")] = "30m",
    role: Annotated[list[str] | None, typer.Option(help="role of the nodes: node or seed; repeatable")] = None,
    probation: Annotated[
        bool, typer.Option("--probation", help="put nodes that use this token on probation, until you vouch for them")
    ] = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Create a join token and print it to stdout. No command can show the token again.

    [bold]Examples[/bold]

      TOKEN=$(atollctl token create)

      atollctl token create --run reef --uses 20 --ttl 2h

      atollctl token create --role seed

      atollctl token create --uses 500 --ttl 7d --probation
    """
    request = wire.CreateTokenRequest(
        run_id=run,
        uses=uses,
        ttl_seconds=max(1, int(parse_duration(ttl).total_seconds())),
        roles=[_role(name) for name in role or ["node"]],
        on_probation=probation,
    )
    with connect(credentials) as client:
        made = client.call(client.stub.CreateToken, request)
    view = made.view
    if output is Output.JSON:
        print_json({"token": made.token, "view": message_dict(view)})
        return
    uses_text = "one use" if view.uses_total == 1 else f"{view.uses_total} uses"
    life = duration_text((view.expires_unix_ms - view.created_unix_ms) / 1000)
    command = "atoll join --name seed --port 7710" if request.roles == [pb.ROLE_SEED] else "atoll join"
    print_to_stderr(f"token {view.id} for run {view.run_id}: {uses_text}, valid for {life}. On the node: {command}")
    print(made.token)


@app.command("list")
def list_tokens(output: OutputOption = Output.TEXT, credentials: CredentialsOption = None) -> None:
    """Show all tokens, the newest first, without their secrets.

    [bold]Example[/bold]

      atollctl token list --output json
    """
    with connect(credentials) as client:
        tokens = client.call(client.stub.ListTokens, wire.ListTokensRequest()).tokens
    show_messages(output, "tokens", tokens, _COLUMNS, lambda token: _row(token, time.time()))


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="id of the token, from `token list`")],
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Revoke a token. Nodes that used it remain members.

    [bold]Example[/bold]

      atollctl token revoke 3f9a1c0b7d2e
    """
    with connect(credentials) as client:
        view = client.call(client.stub.RevokeToken, wire.RevokeTokenRequest(id=token_id)).view
    show(output, {"token": message_dict(view)}, _COLUMNS, [_row(view, time.time())])


def _row(token: wire.TokenView, now: float) -> JsonObject:
    spent = "revoked" if token.revoked else "used up" if not token.uses_left else ""
    expires = time_until(token.expires_unix_ms, now)
    return {
        "id": token.id,
        "run_id": token.run_id,
        "admits": ", ".join(enum_word(pb.Role.DESCRIPTOR, role) for role in token.roles)
        + (" on probation" if token.on_probation else ""),
        "uses": f"{token.uses_left} of {token.uses_total}",
        "expires": expires,
        "state": spent or ("expired" if expires == "expired" else "good"),
    }


def _role(name: str) -> pb.Role:
    if name not in _ROLES:
        raise UsageError(f"{name!r} is not a role", f"choose {' or '.join(_ROLES)}")
    return _ROLES[name]
