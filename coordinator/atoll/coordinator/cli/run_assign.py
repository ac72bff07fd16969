"""`atollctl run assign` and `run clone`: another run for the same nodes, and another run from the same spec."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from atoll.coordinator.cli import node as node_views
from atoll.coordinator.cli import run as run_views
from atoll.coordinator.cli.client import connect
from atoll.coordinator.cli.options import CredentialsOption
from atoll.coordinator.cli.output import message_dict
from atoll.core.errors import Ambiguous, AtollError, Banned, InvalidTransition, NotFound, NotPermitted, UsageError
from atoll.core.output import Output, OutputOption, print_to_stderr
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import common_pb2 as pb

_EXAMPLE = "for example: --set optimizer.weight_decay=0.1"


def assign(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run to which the nodes move")],
    nodes: Annotated[list[str] | None, typer.Argument(metavar="[NODE]...", help="names or peer ids of nodes")] = None,
    all_of: Annotated[
        str, typer.Option("--all-of", metavar="RUN", help="move all connected nodes and seeds of this run")
    ] = "",
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Move nodes and seeds to another run, without new tokens. Each node first finishes its round.

    An offline node moves when it comes back. To cancel the order, assign a node to its present run.

    [bold]Examples[/bold]

      atollctl run assign kelp reef-1 reef-2

      atollctl run assign kelp --all-of reef
    """
    if bool(nodes) == bool(all_of):
        raise UsageError("say which nodes are to move", "name them, or pass --all-of RUN")
    with connect(credentials) as client:
        chosen = list(nodes or ())
        if all_of:
            there = client.call(client.stub.ListNodes, wire.ListNodesRequest(run_id=all_of)).nodes
            seeds_first = sorted(there, key=lambda it: pb.ROLE_SEED not in it.roles)  # nodes then learn where they are
            chosen = [it.peer_id for it in seeds_first if it.connected and not it.banned]
            if not chosen:
                raise UsageError(f"no node of run {all_of!r} is connected", "see `atollctl node list`")
        moved: list[wire.NodeView] = []
        refused: list[AtollError] = []
        for name in dict.fromkeys(chosen):
            try:
                moved.append(client.call(client.stub.AssignNode, wire.AssignNodeRequest(node=name, run_id=run)))
            except (Ambiguous, Banned, InvalidTransition, NotFound, NotPermitted) as error:
                refused.append(error)
                print_to_stderr(f"not moved: {error}")
    if refused and not moved:
        raise refused[0]
    node_views.show_nodes(output, moved)
    if refused:
        raise UsageError(f"{len(refused)} of {len(moved) + len(refused)} nodes were not assigned", "see above")


def clone(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run whose spec is copied")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the new run")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="set a key to another value, as in TOML; repeatable"),
    ] = None,
    defaults: Annotated[
        list[str] | None,
        typer.Option("--unset", metavar="SECTION.KEY", help="reset a key to its default; repeatable"),
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="start the run at once")] = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Create a run from the spec of another run, with some keys changed. It begins with new weights.

    A clone of a fork begins with the same weights as the fork, unless you add --unset fork.

    A stored spec contains all defaults, so the clone keeps every value that you do not change.

    [bold]Examples[/bold]

      atollctl run clone reef kelp --set optimizer.weight_decay=0.1 --start

      atollctl run clone reef kelp --set optimizer.name=adamw --unset optimizer.learning_rate
    """
    with connect(credentials) as client:
        view = client.call(client.stub.GetRun, wire.RunRequest(run_id=run))
        text = changed_spec(view.spec_toml, name, changes or (), defaults or ())
        created = client.call(client.stub.CreateRun, wire.CreateRunRequest(spec_toml=text, start=start))
    run_views.show_runs(output, {"run": message_dict(created)}, [created])
    if not start:
        print_to_stderr(f"start it with: atollctl run start {created.run_id}")
    fork = tomllib.loads(created.spec_toml).get("fork")
    if fork is not None:
        begins = f"round {fork['round']} of run {fork['run']}"
        print_to_stderr(f"note: it begins with the weights of {begins}, as run {view.run_id}; not with --unset fork")
    print_to_stderr(f"give it nodes with: atollctl run assign {created.run_id} --all-of {view.run_id}")


def changed_spec(
    spec_toml: str,
    name: str,
    changes: Sequence[str],
    defaults: Sequence[str],
    fork: Mapping[str, str | int] | None = None,
) -> str:
    """The spec under another name: `changes` set, `defaults` not given; with `fork`, a fork of that round.

    Raises `UsageError`, `RunSpecError`.
    """
    from atoll.core.run_spec import check_run_spec  # imports pydantic

    document = tomllib.loads(spec_toml)
    document["run"]["name"] = name
    if fork is not None:
        document["fork"] = dict(fork)
    for path in defaults:
        if path.strip() == "fork" and fork is None:
            if document.pop("fork", None) is None:
                raise UsageError("that run is no fork: it begins with new weights", "leave out --unset fork")
            continue
        section, key = _section(document, path), path.strip().rpartition(".")[2]
        if key not in section:
            raise UsageError(f"the spec has no key {path.strip()!r}", "see `atollctl run show`")
        del section[key]
    for change in changes:
        if change.partition("=")[0].strip().split(".") == ["run", "name"]:
            raise UsageError("the name of the new run is the second argument", "leave out --set run.name")
        if fork is not None and change.strip().partition(".")[0] == "fork":
            told = change.partition("=")[0].strip()
            raise UsageError("where the new run begins is named by RUN and --from", f"leave out --set {told}")
        set_key(document, change)
    return check_run_spec(document, "the changed spec").resolved_toml()


def set_key(document: dict[str, Any], change: str) -> None:
    """Set a key of a spec: `SECTION.KEY=VALUE`. Raises `UsageError`."""
    path, equals, value = change.partition("=")
    if not (equals and value.strip()):
        raise UsageError(f"{change!r} is not SECTION.KEY=VALUE", _EXAMPLE)
    _section(document, path)[path.strip().rpartition(".")[2]] = _value(value.strip())


def _section(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The table of a dotted key; made if it is missing."""
    *names, key = path.strip().split(".")
    table: Any = document
    for name in names:
        table = table.setdefault(name, {}) if isinstance(table, dict) else None
    if not (names and key and all(names) and isinstance(table, dict)):
        raise UsageError(f"{path!r} does not name a key of a section", _EXAMPLE)
    return table


def _value(text: str) -> object:
    try:
        read = tomllib.loads(f"value = {text}")
        return read["value"] if len(read) == 1 else text
    except tomllib.TOMLDecodeError:
        return text  # a word without quotes
