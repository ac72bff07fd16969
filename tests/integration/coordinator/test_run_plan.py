"""`atollctl run plan`, the time until a run finishes, and credit, over the real protocol."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from integration.coordinator.lab import SECONDS, coordinator
from typer.testing import CliRunner
from unit.coordinator.world import RUN, genesis_report, hash_of, round_report, spec_toml

from atoll.coordinator.cli import main
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb

PROFILE = mb.NodeProfile(
    device="cpu",
    device_name="a CPU",
    device_memory_bytes=4 << 30,
    host_memory_bytes=4 << 30,
    layer_times=[
        mb.LayerTime(kind=kind, forward_seconds_per_token=1e-4, backward_seconds_per_token=2e-4)
        for kind in ("embedding", "block", "head")
    ],
)


async def atollctl(home: Path, *arguments: object) -> Any:
    """What a command prints as JSON."""
    command = [*map(str, arguments), "--credentials", str(home / "admin"), "--output", "json"]
    done = await asyncio.to_thread(CliRunner().invoke, main.app, command)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


async def test_a_run_is_planned_for_the_nodes_of_another_one_and_not_created(tmp_path: Path) -> None:
    spec = tmp_path / "kelp.toml"
    spec.write_text(spec_toml(name="kelp"))
    async with coordinator(tmp_path / "home") as home:
        empty = (await atollctl(home.data_dir, "run", "plan", spec))["plan"]
        assert (empty["predicted"], empty["nodes"], empty["seconds"]) == (None, [], None)
        await home.create_run()
        ann = await (await home.node("ann")).connect(profile=PROFILE)
        try:
            await ann.acknowledged(await ann.say(mb.NODE_STATE_READY))
            plan = (await atollctl(home.data_dir, "run", "plan", spec, "--price-per-hour", "2"))["plan"]
            assert plan["parameters"] == empty["parameters"] > 0
            assert [(node["name"], node["run_id"], node["route"]) for node in plan["nodes"]] == [("ann", RUN, 1)]
            pace = plan["predicted"]["tokens_per_second"]
            assert 0 < pace <= 1 / (3e-4 * 6) * 1.01  # six layers
            assert plan["cost"] == 2 * plan["seconds"] / 3600
            runs = (await home.admin.ListRuns(admin.ListRunsRequest(), timeout=SECONDS)).runs
            assert [run.run_id for run in runs] == [RUN]
        finally:
            await ann.close()


async def test_a_node_and_the_operator_are_told_the_same_end_of_the_run_and_the_same_credit(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "home") as home:
        await home.create_run(min_nodes=1)
        ann = await (await home.node("ann")).connect(profile=PROFILE)
        try:
            await ann.hear(lambda response: response.order == mb.ORDER_WRITE_GENESIS)
            genesis = genesis_report(ann.identity)
            await ann.say(mb.NODE_STATE_READY, genesis=genesis)
            version = (await ann.plan(1)).known_round  # 0: genesis is the head
            assert version == 0
            previous = hash_of(genesis)
            for number in range(1, 6):
                report = round_report(number, previous, [ann.identity], committed_before=500 * (number - 1))
                previous = hash_of(report)
                ann.head = (number, previous)
                await asyncio.sleep(0.02)  # each round takes some time
                await ann.acknowledged(await ann.say(rounds=[report]))
            shown = (await atollctl(home.data_dir, "run", "show"))["run"]
            assert shown["head_round"] == 5
            assert shown["recent_tokens_per_second"] > 0
            told = await ann.hear(lambda response: response.HasField("eta_unix_ms") and response.known_round == 5)
            assert abs(told.eta_unix_ms - shown["eta_unix_ms"]) < 1000 * SECONDS
            credit = {"tokens": 2500, "rounds": 5, "rank": 1}
            assert MessageToDict(told.credit) == {"tokens": "2500", "rounds": "5", "rank": 1, "nodes": 1}
            listed = await atollctl(home.data_dir, "run", "credits")
            assert (listed["run"], listed["tokens"], listed["nodes"]) == ("reef", 2500, 1)
            assert listed["credits"][0].items() >= {"name": "ann", "peer_id": ann.identity.peer_id, **credit}.items()
        finally:
            await ann.close()
