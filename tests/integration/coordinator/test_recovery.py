"""A run recovered by the operator's program, and by itself, with nodes on real streams."""

from __future__ import annotations

import asyncio
from pathlib import Path

from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator
from integration.coordinator.test_membership import begin, close, plan_in
from support.eventually import eventually
from typer.testing import CliRunner
from unit.coordinator.world import RUN, genesis_report, hash_of, round_report

from atoll.coordinator.cli import main
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb


async def two_rounds(home: Coordinator, nodes: list[Node]) -> list[bytes]:
    """Hashes of rounds 1 and 2, both reported; who says more says that it holds the second."""
    identities = [node.identity for node in nodes]
    first = round_report(1, hash_of(genesis_report(nodes[0].identity)), identities)
    second = round_report(2, hash_of(first), identities, committed_before=500 * len(nodes))
    for node in nodes:
        node.head = (2, hash_of(second))
        reports = [first, second] if node is nodes[0] else []
        await node.acknowledged(await node.say(rounds=reports))
    return [hash_of(first), hash_of(second)]


async def test_the_operator_recovers_a_run_that_lost_its_majority(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        nodes = await begin(home, "ann", "bob", "cid")
        hashes = await two_rounds(home, nodes)
        for gone in nodes[1:]:
            await gone.close()
        await eventually(
            lambda: home.controller.state.memory[RUN].undecidable_reason
        )  # they are lost: no plan can decide
        command = ["run", "recover", "--yes", "--credentials", str(home.data_dir / "admin")]
        result = await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, main.app, command), SECONDS)
        assert result.exit_code == 0, result.output
        told = await nodes[0].hear(
            lambda response: response.HasField("plan") and plan_in(response, home).base.round == 2
        )
        base = plan_in(told, home).base
        assert (base.manifest_hash, base.seats) == (hashes[1], (nodes[0].identity.peer_id,))
        await close(nodes[:1])


async def test_a_swarm_that_returns_from_checkpoints_recovers_by_itself(tmp_path: Path) -> None:
    data_dir = tmp_path / "c"
    async with coordinator(data_dir) as home:
        nodes = await begin(home, "ann", "bob")
        hashes = await two_rounds(home, nodes)
        await close(nodes)
    async with coordinator(data_dir, recover_seconds=0.5) as home:
        for node in nodes:
            node.home, node.head = home, (1, hashes[0])
            await node.connect(mb.NODE_STATE_READY)
        for node in nodes:
            told = await node.hear(
                lambda response: response.HasField("plan") and plan_in(response, home).base.round == 1
            )
            assert plan_in(told, home).base.manifest_hash == hashes[0]
        run = await home.admin.GetRun(admin.RunRequest(), timeout=SECONDS)
        assert (run.head_round, run.committed_tokens, run.rounds_committed) == (1, 1000, 1)
        await close(nodes)
