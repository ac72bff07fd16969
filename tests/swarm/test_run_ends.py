"""Checkpoints on order, nodes that are forgotten, and runs that are deleted, with real nodes."""

import asyncio
import signal

import pytest
from support.process_swarm import READY, SWARM_TEST, process_swarm

from atoll.core.errors import AtollError
from atoll.lab.faults import kill

pytestmark = SWARM_TEST


async def exit_code(swarm, name):
    """How a program ends by itself."""
    program = swarm.programs.pop(name)
    return await asyncio.wait_for(program.child.wait(), READY.total_seconds())


async def join_again(swarm, name):
    """As its owner does with a new token, in the same directory."""
    await swarm.start_member(name, "node", "--cpu-threads", "1", "--minimum-step-seconds", "0.05")


async def test_a_checkpoint_on_order_comes_soon_and_of_a_paused_run_too(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=10_000_000, round_tokens=1500)
        for name in ("ann", "bob"):
            await swarm.node(name)
        await swarm.rounds("ann", 3)
        known = (await swarm.json("run", "show"))["run"]["head_round"]
        found = (await swarm.json("run", "checkpoint", "reef", "--timeout", "120s"))["checkpoint"]
        assert found["written_round"] >= found["round"] >= known > 1  # the first round's was written without an order
        for item in found["checkpoints"]:
            path = tmp_path / item["node_name"] / "runs/reef/checkpoints" / f"{found['written_round']:09d}"
            assert item["checkpoint"]["bytes"] == sum(file.stat().st_size for file in path.iterdir())

        await swarm.rounds("ann", 1)
        await swarm.ctl("run", "pause")
        paused = (await swarm.json("run", "checkpoint", "--timeout", "120s"))["checkpoint"]
        assert paused["written_round"] > found["written_round"]


async def test_a_forgotten_node_ends_and_joins_again_and_a_deleted_run_can_be_made_anew(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=10_000_000, round_tokens=1500)
        for name in ("ann", "bob", "cid"):
            await swarm.node(name)
        await swarm.rounds("ann", 2)
        await kill(swarm, "cid")

        async def forgotten():
            try:
                await swarm.ctl("node", "forget", "cid", "--yes")
            except AtollError:
                return False  # it counts as present for a while, then a round must commit without it
            return True

        async with asyncio.timeout(READY.total_seconds()):
            while not await forgotten():
                await asyncio.sleep(0.5)
        program = await swarm.restart_member("cid")
        assert await exit_code(swarm, "cid") == 77
        assert "the operator removed this node from run 'reef'" in program.log.read_text()
        await join_again(swarm, "cid")
        await swarm.reach("cid", "training")
        names = {node["name"] for node in (await swarm.json("node", "list"))["nodes"]}
        assert names == {"seed", "ann", "bob", "cid"}

        with pytest.raises(AtollError, match="only a run that is over"):
            await swarm.ctl("run", "delete", "reef", "--yes")
        spec = (await swarm.json("run", "show", "reef"))["run"]["spec_toml"]
        await swarm.ctl("run", "stop", "reef", "--yes")
        for name in ("ann", "bob", "cid"):
            assert await exit_code(swarm, name) == 0
        seed = swarm.programs.pop("seed")
        seed.child.send_signal(signal.SIGTERM)
        await asyncio.wait_for(seed.child.wait(), READY.total_seconds())
        await swarm.ctl("run", "delete", "reef", "--yes")
        program = await swarm.restart_member("bob")
        assert await exit_code(swarm, "bob") == 77
        assert "the operator deleted run 'reef'" in program.log.read_text()

        await swarm.create_run(spec)  # the same name
        await swarm.start_member("seed", "seed")
        for name in ("ann", "bob"):
            await join_again(swarm, name)
        await swarm.reach("ann", "training")
        await swarm.rounds("ann", 2)
        plan = (await swarm.json("plan", "show"))["plan"]
        assert plan["base"]["round"] == 0
        assert plan["base"]["since_version"] > 1
        (aside,) = (tmp_path / "ann/runs").glob("reef.*")
        assert (aside / "manifests").is_dir()
        assert swarm.chain("ann").keys() <= set(range(1, (await swarm.json("run", "show"))["run"]["head_round"] + 2))
