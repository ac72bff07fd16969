"""One swarm, several runs: the operator moves nodes and seeds, and nobody needs a new token."""

import pytest
from support.process_swarm import READY, process_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


async def test_nodes_and_their_seed_train_a_second_run_without_new_tokens(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=6_000, round_tokens=1500)
        for name in ("ann", "bob"):
            await swarm.node(name)
        for name in ("ann", "bob"):
            await swarm.reach(name, "finished")
        processes = {name: swarm.programs[name].pid for name in ("seed", "ann", "bob")}
        tokens = await swarm.json("token", "list")

        await swarm.ctl("run", "clone", "reef", "kelp", "--set", "run.stop_tokens=9000", "--start")
        await swarm.ctl("run", "assign", "kelp", "--all-of", "reef")

        def trained(name):
            status = swarm.status(name)
            return status is not None and (status["run"], status["state"]) == ("kelp", "finished")

        for name in ("ann", "bob"):
            await swarm.until(lambda: trained(name), f"{name} did not finish the second run", READY)  # noqa: B023
        assert swarm.anchor_digest("ann") == swarm.anchor_digest("bob")
        run = (await swarm.json("run", "show", "kelp"))["run"]
        assert run["committed_tokens"] >= 9000
        assert {name: swarm.programs[name].pid for name in processes} == processes
        assert await swarm.json("token", "list") == tokens
        nodes = (await swarm.json("node", "list"))["nodes"]
        assert {node["name"]: node["run_id"] for node in nodes} == dict.fromkeys(processes, "kelp")
