"""Whole swarms on loopback: shipped programs, real sockets, real training."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from support.process_swarm import READY, SWARM_TEST, nothing_left, process_swarm

from atoll.core.manifest import require_signers
from atoll.lab.demo import FULL_PACE_SECONDS, SLOWDOWNS
from atoll.node.state.manifests import ManifestStore

pytestmark = SWARM_TEST
BIN = Path(sys.executable).parent


async def test_two_nodes_end_with_equal_anchors_and_a_signed_chain(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=20_000, codec="fp32")
        await swarm.node("ann")
        await swarm.node("bob", 0.05, "--device", "cpu,cpu")  # one member, whatever it has
        for name in ("ann", "bob"):
            await swarm.reach(name, "finished")
        assert swarm.anchor_digest("ann") == swarm.anchor_digest("bob")
        await told_measurements(swarm)
        await told_metrics(swarm)

        run = (await swarm.json("run", "show", "reef"))["run"]
        assert run["rounds_committed"] >= 3
        abandoned = await told_of_abandoned(swarm)  # a stall may cost an attempt, and nobody may be silent about it
        assert run["rounds_opened"] == run["rounds_committed"] + len(abandoned), abandoned
        losses = [item["loss"] for item in run["evaluations"]]
        assert losses[-1] < 0.8 * losses[0]

        chains = [ManifestStore(tmp_path / name / "runs/reef/manifests", "reef") for name in ("ann", "bob")]
        heads = [store.newest() for store in chains]
        assert heads[0].hash == heads[1].hash
        contributors = [item.peer_id for item in heads[0].manifest.contributions]
        assert len(contributors) == 2
        require_signers(heads[0], contributors)
        for number in range(1, heads[0].round + 1):
            kept = [found.payload for store in chains if (found := store.get(number)) is not None]
            assert len(set(kept)) == 1  # a node that is late for a round goes on from the next one


async def told_of_abandoned(swarm):
    events = (await swarm.ctl("events", "--output", "json")).splitlines()
    found = [json.loads(line)["event"] for line in events]
    return [event["message"] for event in found if event["kind"] == "round.abandoned"]


async def told_measurements(swarm):
    """Nodes say what they measured of themselves and of one another, within some heartbeats."""
    async with asyncio.timeout(READY.total_seconds()):
        while True:
            nodes = {name: (await swarm.json("node", "show", name))["node"] for name in ("ann", "bob")}
            if all(node["paths"] for node in nodes.values()):
                break
            await asyncio.sleep(0.5)
    for node, other in ((nodes["ann"], nodes["bob"]), (nodes["bob"], nodes["ann"])):
        (path,) = node["paths"]
        assert path["peer_id"] == other["peer_id"]
        assert path["rtt_seconds"] > 0
        times = node["profile"]["layer_times"]
        assert [time["kind"] for time in times] == ["embedding", "block", "head"]
        assert all(time["backward_seconds_per_token"] > 0 for time in times)
    explained = await swarm.json("plan", "explain", "--seconds", "1")
    assert {place["machine"] for place in explained["plan"]["places"]} == {"ann", "bob"}
    assert explained["plan"]["tokens_per_second"] > 0


async def told_metrics(swarm):
    """Each node has reported its rounds by the time it is finished, or does within some heartbeats."""
    async with asyncio.timeout(READY.total_seconds()):
        while True:
            found = (await swarm.json("metrics", "reef"))["metrics"]
            rows = {name: [row for row in found if row["node"] == name] for name in ("ann", "bob")}
            if all(any(row["train_loss"] for row in each) for each in rows.values()):
                break
            await asyncio.sleep(0.5)
    for each in rows.values():
        losses = [row["train_loss"] for row in each if row["train_loss"] is not None]
        assert all(0 < loss < 20 for loss in losses)
        assert sum(row["tokens"] for row in each) > 0
        assert any(row["update_norm"] for row in each)
        assert any(row["exchange_seconds"] for row in each)
        assert sum(row["bytes_sent"] for row in each) > 0
        assert sum(row["bytes_received"] for row in each) > 0
        assert all(row["learning_rate"] > 0 for row in each)


def test_the_demo_prints_what_it_promises(tmp_path):
    """Four nodes, int4, carry, two of them slowed: as a person runs it, only shorter."""
    command = [BIN / "atoll", "demo", "--tokens", "60000", "--output", "json", "--keep", tmp_path / "kept"]
    with nothing_left(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
    it = json.loads(done.stdout)["demo"]
    assert set(it) >= {
        "nodes", "rounds_opened", "rounds_committed", "parts_zeroed", "tokens", "steps_per_node", "val_loss_first",
        "val_loss_last", "anchor_digests", "anchors_equal", "averaging_bytes_sent", "averaging_bytes_fp32",
        "other_bytes_sent", "kills", "rejoined", "coordinator_restarts", "checkpoint", "seconds",
    }  # fmt: skip
    assert it["anchors_equal"]
    assert len(set(it["anchor_digests"].values())) == 1
    assert it["parts_zeroed"] == 0
    assert it["tokens"] >= 60_000
    assert it["averaging_bytes_fp32"] / it["averaging_bytes_sent"] >= 7
    assert it["val_loss_last"] < 0.7 * it["val_loss_first"]
    # A slowed node takes no more steps than its pace allows; how many the others take is the machine's affair.
    assert set(it["steps_per_node"]) == {"node-1", "node-2", "node-3", "node-4"}
    for slowdown, steps in zip(SLOWDOWNS, it["steps_per_node"].values(), strict=True):
        assert 0 < steps <= it["seconds"] / (FULL_PACE_SECONDS * slowdown) + 1
    assert Path(it["checkpoint"]).stat().st_size > 1_000_000
