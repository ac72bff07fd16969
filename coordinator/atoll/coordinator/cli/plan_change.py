"""Changes of plans: between two versions, by a pin, by planning now."""

from __future__ import annotations

import re
from collections.abc import Iterator

from atoll.coordinator.cli.client import Client
from atoll.coordinator.cli.formatting import count_or_dash, size_or_dash
from atoll.coordinator.cli.output import Column, JsonObject, message_dict, show
from atoll.coordinator.sanitize import clean
from atoll.core.errors import UsageError
from atoll.core.output import Output, print_to_stderr
from atoll.v1 import admin_pb2 as wire
from atoll.v1 import plan_pb2

_SPAN = re.compile(r"(\d{1,6})-(\d{1,6})")
_DIFF_COLUMNS = [Column("node"), Column("peer"), Column("before"), Column("after")]
_CHANGE_COLUMNS = [*_DIFF_COLUMNS, Column("fetches", align_right=True)]
_PIN_COLUMNS = [Column("node", "name"), Column("peer"), Column("pin"), Column("layers now", "layers")]


def diff(client: Client, run: str, earlier: int, later: int, output: Output) -> None:
    """Fetch two plans and print the nodes whose layers differ."""
    views = [
        client.call(client.stub.GetPlan, wire.GetPlanRequest(run_id=run, version=version))
        for version in (earlier, later)
    ]
    changes = list(_changes(*views))
    show(output, {"from": earlier, "to": later, "changes": changes}, _DIFF_COLUMNS, changes)
    if output is Output.TEXT and not changes:
        print_to_stderr(f"plans {earlier} and {later} give every node the same layers")


def pin_request(node: str, layers: str, *, out: bool) -> wire.PinNodeRequest:
    """Build a request from the command's arguments. Raises `UsageError`."""
    span = _SPAN.fullmatch(layers)
    if bool(layers) == out or (layers and span is None):
        raise UsageError("pin needs either --layers or --out", "give --layers FIRST-LAST, as in 0-11, or --out")
    first_last = plan_pb2.Span(first=int(span[1]), last=int(span[2])) if span else None
    return wire.PinNodeRequest(node=node, span=first_last)


def show_pin(node: wire.NodeView, output: Output) -> None:
    """Print the node after its pin changed."""
    row: JsonObject = {
        "name": node.name,
        "peer": f"…{node.peer_id[-8:]}",
        "pin": node.pin or "–",
        "layers": _span(node.span) if node.HasField("span") else "–",
    }
    show(output, {"node": message_dict(node)}, _PIN_COLUMNS, [row])


def show_change(response: wire.ApplyPlanResponse, output: Output, *, dry_run: bool) -> None:
    """Print what a plan changes, or would change."""
    rows: list[JsonObject] = [
        {
            "node": item.name,
            "peer": f"…{item.peer_id[-8:]}",
            "before": item.before or "–",
            "after": item.after or "–",
            "fetches": size_or_dash(item.fetched_bytes),
        }
        for item in response.moves
    ]
    show(output, {"dry_run": dry_run, "change": message_dict(response)}, _CHANGE_COLUMNS, rows)
    if output is Output.TEXT:
        for line in _sentences(response, dry_run=dry_run):
            print_to_stderr(clean(line))


def _sentences(response: wire.ApplyPlanResponse, *, dry_run: bool) -> Iterator[str]:
    if response.missing:
        yield f"no plan is possible: {response.missing}"
        return
    if response.after_tokens_per_second:
        before, after = response.before_tokens_per_second, response.after_tokens_per_second
        yield f"predicted: {count_or_dash(before)} tokens/s before, {count_or_dash(after)} after"
    for item in response.left_out:
        yield f"left out: {item.name or item.peer_id}: {item.reason}"
    if response.version:
        yield f"plan {response.version} was issued: {response.reason}"
    elif response.changes and dry_run:
        yield f"nothing was issued: this was a dry run ({response.reason})"
    else:
        yield f"the plan stays: {response.reason}"


def _changes(earlier: wire.PlanView, later: wire.PlanView) -> Iterator[JsonObject]:
    """Rows of nodes whose layers differ, by name."""
    names = {item.peer_id: item.name for view in (earlier, later) for item in view.nodes}
    before, after = ({item.peer_id: _span(item.span) for item in view.plan.assignments} for view in (earlier, later))
    for peer in sorted(before.keys() | after.keys(), key=lambda peer_id: (names.get(peer_id, ""), peer_id)):
        if before.get(peer) != after.get(peer):
            yield {
                "node": names.get(peer) or "–",
                "peer": peer,
                "before": before.get(peer, "–"),
                "after": after.get(peer, "–"),
            }


def _span(span: plan_pb2.Span) -> str:
    return f"{span.first}-{span.last}"
