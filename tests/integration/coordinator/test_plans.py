"""A run whose model no node can hold, planned by the coordinator that ships and steered by the operator's program."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator
from integration.coordinator.test_membership import close, plan_in
from typer.testing import CliRunner
from unit.coordinator.routed import LONG_ROUNDS, card, covers, rows
from unit.coordinator.world import genesis_report, layer_table

from atoll.coordinator.cli import main
from atoll.coordinator.planner.plan_builder import routes_of
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb


async def ctl(home: Coordinator, *words: str) -> Any:
    """What `atollctl` prints, as JSON."""
    command = [*words, "--output", "json", "--credentials", str(home.data_dir / "admin")]
    result = await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, main.app, command), SECONDS)
    assert result.exit_code == 0, (result.output, result.exception)
    found, _ = json.JSONDecoder().raw_decode(result.stdout[result.stdout.index("{") :])  # the log stands beside it
    return found


async def halves(home: Coordinator, *names: str) -> list[Node]:
    """A run that trains in one route of nodes with room for six of twelve layers each, once these have a plan."""
    await home.create_run(min_nodes=len(names), **LONG_ROUNDS)
    table = layer_table(rows())
    nodes = [await home.node(name) for name in names]
    for node in nodes:
        await node.connect(profile=card(6), layers=table)
    nodes.sort(key=lambda node: node.identity.peer_id)
    await nodes[0].hear(lambda response: response.order == mb.ORDER_WRITE_GENESIS)
    await nodes[0].say(mb.NODE_STATE_READY, genesis=genesis_report(nodes[0].identity, table=table))
    return nodes


def spans_in(plan: Plan) -> dict[str, tuple[int, int]]:
    return {item.peer_id: (item.first_layer, item.last_layer) for item in plan.assignments}


async def test_a_route_is_planned_mended_shown_and_steered(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c", plan_search_seconds=2.0) as home:
        ann, bob = await halves(home, "ann", "bob")
        plan = plan_in(await ann.plan(1), home)
        (route,) = routes_of(plan)
        assert covers(route)

        spare = await home.node("cid")
        await spare.connect(profile=card(6))
        shown = await ctl(home, "plan", "show")
        assert [node["span"] for node in shown["nodes"]] == [{"first": part.first, "last": part.last} for part in route]
        lost = next(node for node in (ann, bob) if node.identity.peer_id == route[1].peer_id)
        stays = ann if lost is bob else bob
        await lost.close()
        mended = plan_in(await stays.plan(2), home)
        assert spans_in(mended)[spare.identity.peer_id] == (route[1].first, route[1].last)
        assert spans_in(mended)[stays.identity.peer_id] == (route[0].first, route[0].last)

        moved = await ctl(home, "plan", "diff", "1", "2")
        assert {change["node"] for change in moved["changes"]} == {lost.name, "cid"}
        versions = await ctl(home, "plan", "history")
        assert [item["version"] for item in versions["plans"]] == [1, 2]
        assert all(item["predicted_tokens_per_second"] > 0 for item in versions["plans"])

        pinned = await ctl(home, "plan", "pin", "cid", "--layers", "0-4")
        assert pinned["node"]["pin"] == "0-4"
        dry = await ctl(home, "plan", "apply", "--dry-run")
        assert dry["change"]["version"] == 0
        assert "more memory" in dry["change"]["missing"] or "no route" in dry["change"]["missing"]
        await ctl(home, "plan", "unpin", "cid")
        await close([stays, spare])
