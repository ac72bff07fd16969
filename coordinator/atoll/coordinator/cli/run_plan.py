"""`atollctl run plan`: what a run would need and do, before it is created. Nothing is changed on the coordinator."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.coordinator.cli.client import Client, connect
from atoll.coordinator.cli.options import CredentialsOption, SetOption, SpecArgument
from atoll.coordinator.cli.output import print_sentences, show, show_facts
from atoll.coordinator.cli.run import read_spec
from atoll.coordinator.cli.spec_changes import set_key
from atoll.core.errors import RunSpecError, UsageError
from atoll.core.output import Output, OutputOption
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import common_pb2 as pb

if TYPE_CHECKING:
    from atoll.coordinator.planner.placement_forecast import Candidate
    from atoll.coordinator.planner.run_forecast import KnownRun
    from atoll.core.run_spec import RunSpec


def plan_run(
    file: SpecArgument,
    changes: SetOption = None,
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="count only nodes of this run")] = "",
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="price of one node, to print what the run costs")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="do not ask a coordinator; count no nodes")] = False,
    output: OutputOption = Output.TEXT,
    credentials: CredentialsOption = None,
) -> None:
    """Show size, batch, rounds, traffic, memory, time and cost of a run, without creating it.

    The planner predicts the speed from measurements of connected nodes in their present runs.

    [bold]Examples[/bold]

      atollctl run plan reef.toml --price-per-hour 0.40

      atollctl run plan reef.toml --set model.preset=1b --offline
    """
    if offline and run:
        raise UsageError("--offline asks for no nodes", "leave out --run")
    spec = changed(read_spec(file), changes or ())
    from atoll.coordinator.cli.run_plan_report import COLUMNS, document, facts, make_run_plan, node_rows, sentences

    runs, candidates = _nothing() if offline else _what_is_there(credentials, run)
    plan = make_run_plan(spec, runs, candidates, price_per_hour)
    if output is Output.JSON:
        show_facts(output, {"plan": document(plan)}, ())
        return
    show_facts(output, {}, facts(plan))
    if rows := node_rows(plan):
        print()
        show(output, {}, COLUMNS, rows)
    print()
    print_sentences(sentences(plan))


def changed(text: str, changes: Sequence[str]) -> RunSpec:
    """Read a spec and change keys of it. Raises `RunSpecError` as `run create` does, and `UsageError`."""
    from atoll.core.run_spec import check_run_spec, parse_run_spec  # imports pydantic

    if not changes:
        return parse_run_spec(text)
    try:
        spec = tomllib.loads(text)
    except (ValueError, RecursionError):
        return parse_run_spec(text)  # raises the error
    for change in changes:
        set_key(spec, change)
    return check_run_spec(spec)


def _nothing() -> tuple[list[KnownRun], list[Candidate]]:
    return [], []


def _what_is_there(credentials: Path | None, run_id: str) -> tuple[list[KnownRun], list[Candidate]]:
    """Runs, and connected nodes that may train: of one run, or of all."""
    with connect(credentials) as client:
        runs = _runs(client)
        nodes = client.call(client.stub.ListNodes, wire.ListNodesRequest(run_id=run_id)).nodes
    from atoll.coordinator.cli.plan_explain import distinct_names, planner_node
    from atoll.coordinator.planner.placement_forecast import Candidate

    known = {run.run_id: run for run in runs}
    there = [
        node
        for node in nodes
        if node.connected
        and pb.ROLE_NODE in node.roles
        and not (node.banned or node.draining or node.left)
        and node.profile.device
        and node.run_id in known
    ]
    candidates = []
    for node, name in distinct_names(there):
        layers = len(known[node.run_id].layers.layers)
        span = (node.span.first, node.span.last)
        alone = not node.HasField("span") or span == (0, layers - 1)
        candidates.append(Candidate(planner_node(node, name, span, trains_alone=alone), known[node.run_id]))
    return runs, candidates


def _runs(client: Client) -> list[KnownRun]:
    from atoll.coordinator.planner.run_forecast import KnownRun
    from atoll.core.run_spec import parse_run_spec

    found = []
    for view in client.call(client.stub.ListRuns, wire.ListRunsRequest()).runs:
        with suppress(RunSpecError):  # the run may be from a coordinator of another release
            found.append(KnownRun(view.run_id, parse_run_spec(view.spec_toml), view.layers))
    return found
