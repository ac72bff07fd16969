"""One swarm, several runs: the operator moves nodes and seeds, and nobody needs a new token."""

import asyncio
import signal

from support.process_swarm import READY, SWARM_TEST, process_swarm

from atoll.lab.faults import kill

pytestmark = SWARM_TEST


async def in_run(swarm, name, run_id, *states):
    """Wait until a node is in one of these states of that run."""

    def there():
        status = swarm.status(name)
        return status is not None and status["run"] == run_id and status["state"] in states

    await swarm.until(there, f"{name} is not {' or '.join(states)} in {run_id}", READY)


async def test_the_same_processes_train_three_runs_with_the_tokens_of_the_first(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=6_000, round_tokens=1500)
        for name in ("ann", "bob"):
            await swarm.node(name)
        for name in ("ann", "bob"):
            await swarm.reach(name, "finished")
        processes = {name: swarm.programs[name].pid for name in ("seed", "ann", "bob")}
        tokens = await swarm.json("token", "list")

        for before, after in (("reef", "kelp"), ("kelp", "dune")):
            await swarm.ctl("run", "clone", before, after, "--set", "run.stop_tokens=7000", "--start")
            await swarm.ctl("run", "assign", after, "--all-of", before)
            for name in ("ann", "bob"):
                await in_run(swarm, name, after, "finished")
            assert swarm.anchor_digest("ann") == swarm.anchor_digest("bob")
            assert (await swarm.json("run", "show", after))["run"]["committed_tokens"] >= 7000

        assert {name: swarm.programs[name].pid for name in processes} == processes
        assert await swarm.json("token", "list") == tokens
        nodes = (await swarm.json("node", "list"))["nodes"]
        assert {node["name"]: node["run_id"] for node in nodes} == dict.fromkeys(processes, "dune")


async def test_two_runs_at_once_and_a_node_that_is_killed_on_its_way_back(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=10_000_000, round_tokens=1500)
        for name in ("ann", "bob"):
            await swarm.node(name)
        await swarm.start_member("seed-2", "seed")
        await swarm.rounds("ann", 2)
        await swarm.until(lambda: swarm.in_state("seed-2", "ready"), "seed-2 not ready", READY)

        changes = ("--set", "run.min_nodes=1", "--set", "run.stop_tokens=5000")
        await swarm.ctl("run", "clone", "reef", "kelp", *changes, "--start")
        await swarm.ctl("run", "assign", "kelp", "seed-2", "bob")
        await in_run(swarm, "bob", "kelp", "finished")
        assert (await swarm.json("run", "show", "reef"))["run"]["state"] == "training"
        await swarm.rounds("ann", 2)  # the first run goes on without it

        await swarm.ctl("run", "assign", "reef", "bob")
        await kill(swarm, "bob")
        await swarm.restart_member("bob")
        await in_run(swarm, "bob", "reef", "training")
        await swarm.rounds("bob", 2)
        assert set(swarm.chain("bob")) & set(swarm.chain("ann"))

        await swarm.ctl("run", "clone", "reef", "dune", "--start")
        await swarm.ctl("run", "assign", "dune", "ann")
        program = swarm.programs.pop("ann")
        program.child.send_signal(signal.SIGTERM)  # whatever the move has come to, the process ends
        assert await asyncio.wait_for(program.child.wait(), READY.total_seconds()) == 0
