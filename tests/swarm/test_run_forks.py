"""A run that begins with the weights of a round of another run, by the same processes."""

import asyncio
import hashlib

import pytest
from support.process_swarm import READY, SWARM_TEST, process_swarm

from atoll.core.manifest import Head
from atoll.node.state.checkpoint import read_metadata, scan_checkpoint
from atoll.node.state.checkpoint_files import ANCHOR
from atoll.node.state.former_checkpoints import checkpoint_directory
from atoll.node.state.manifests import ManifestStore

pytestmark = SWARM_TEST

KEEP = 30  # a round takes half a second, a command one


@pytest.fixture(autouse=True)
def a_checkpoint_each_round(monkeypatch):
    monkeypatch.setenv("ATOLL_CHECKPOINT_INTERVAL_SECONDS", "0")
    monkeypatch.setenv("ATOLL_CHECKPOINT_KEEP", str(KEEP))


async def two_nodes_at_round(swarm, number):
    await swarm.begin(nodes=2, tokens=10_000_000, round_tokens=1500)
    for name in ("ann", "bob"):
        await swarm.node(name)
    await swarm.until(lambda: swarm.round("ann") >= number, f"round {number} did not come", READY)


async def held_by_both(swarm):
    """The newest evaluated round of which both nodes report a checkpoint, once there is one."""
    async with asyncio.timeout(READY.total_seconds()):
        while True:
            listed = (await swarm.json("checkpoint", "list", "--run", "reef"))["checkpoints"]
            evaluated = {int(it["round"]) for it in (await swarm.json("run", "show", "reef"))["run"]["evaluations"]}
            rounds = [int(it["checkpoint"]["round"]) for it in listed if it["committed"]]
            both = {number for number in rounds if rounds.count(number) == 2} & evaluated
            if both:
                return max(both)


async def in_run(swarm, name, run_id, *states):
    def there():
        status = swarm.status(name)
        return status is not None and status["run"] == run_id and status["state"] in states

    await swarm.until(there, f"{name} is not {' or '.join(states)} in {run_id}", READY)


def digests_of(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def anchor_digests(manifest):
    return [layer.anchor_digest for layer in manifest.layers]


async def test_a_fork_begins_with_the_very_weights_of_its_source_and_trains_on_at_another_rate(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await two_nodes_at_round(swarm, 4)
        number = await held_by_both(swarm)
        before = (await swarm.json("run", "show", "reef"))["run"]
        rate = next(line for line in before["spec_toml"].splitlines() if line.startswith("learning_rate"))
        half = str(float(rate.partition("=")[2]) / 2)

        changes = ("--set", f"optimizer.learning_rate={half}", "--set", "run.stop_tokens=8000")
        await swarm.ctl("run", "fork", "reef", "kelp", "--from", str(number), *changes, "--start")
        source = checkpoint_directory(tmp_path / "ann" / "runs", "reef", number)
        before_it_is_old = digests_of(source)
        await swarm.rounds("ann", KEEP + 3)  # more than the node keeps: the fork's round stays
        assert digests_of(source) == before_it_is_old
        assert scan_checkpoint(source).head.round == number  # every byte matches the sums and the manifest
        assert len(list(source.parent.iterdir())) <= KEEP + 1  # and perhaps one that is being written
        await swarm.ctl("run", "assign", "kelp", "--all-of", "reef")
        for name in ("ann", "bob"):
            await in_run(swarm, name, "kelp", "finished")

        genesis = ManifestStore(tmp_path / "ann" / "runs/kelp/manifests", "kelp").get(0)
        assert genesis is not None
        assert anchor_digests(Head(genesis).manifest) == anchor_digests(read_metadata(source).head.manifest)
        reef, kelp = [(await swarm.json("run", "show", name))["run"] for name in ("reef", "kelp")]
        assert f"learning_rate = {half}" in kelp["spec_toml"]
        losses = {int(it["round"]): it["loss"] for it in reef["evaluations"]}
        assert kelp["evaluations"][0]["round"] in (0, "0")
        assert kelp["evaluations"][0]["loss"] == pytest.approx(losses[number], abs=1e-4)
        assert kelp["evaluations"][-1]["loss"] < losses[1]
        assert swarm.anchor_digest("ann") == swarm.anchor_digest("bob")


async def test_a_node_whose_checkpoint_is_damaged_says_so_and_another_one_writes_the_genesis(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await two_nodes_at_round(swarm, 3)
        number = await held_by_both(swarm)
        short = ("--set", "run.stop_tokens=4000", "--start")
        await swarm.ctl("run", "fork", "reef", "kelp", "--from", str(number), *short)
        nodes = (await swarm.json("node", "list"))["nodes"]
        first = min((it for it in nodes if "node" in it["roles"]), key=lambda it: it["peer_id"])["name"]
        anchor = checkpoint_directory(tmp_path / first / "runs", "reef", number) / ANCHOR
        damaged = bytearray(anchor.read_bytes())
        damaged[-1] ^= 1
        anchor.write_bytes(damaged)
        digest = hashlib.sha256(anchor.read_bytes()).hexdigest()

        await swarm.ctl("run", "assign", "kelp", "--all-of", "reef")
        for name in ("ann", "bob"):
            await in_run(swarm, name, "kelp", "finished")
        told = await swarm.ctl("events", "--run", "kelp", "--kind", "genesis.refused")
        assert f"{first} cannot write genesis: its checkpoint is damaged" in told
        assert str(tmp_path) not in told
        assert hashlib.sha256(anchor.read_bytes()).hexdigest() == digest  # nothing is lost
