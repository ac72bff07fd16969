"""Real processes, real SIGKILL and SIGSTOP: nothing committed is lost, nobody hangs, every replica is equal."""

from support.process_swarm import READY, SWARM_TEST, ProcessSwarm, process_swarm

from atoll.lab.faults import frozen, kill, same_ports

pytestmark = SWARM_TEST
MANY = 10**9


def assert_one_history(swarm: ProcessSwarm, *names: str) -> None:
    """No two nodes know different manifests for one round."""
    chains = [swarm.chain(name) for name in names]
    for number in {number for known in chains for number in known}:
        assert len({known[number].hash for known in chains if number in known}) == 1, f"round {number}"


async def test_a_frozen_member_is_dropped_and_comes_back(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=3, tokens=MANY)
        for name in ("ann", "bob", "cleo"):
            await swarm.node(name)
        await swarm.rounds("ann", 4)
        for whole in (False, True):
            held = swarm.round("ann")
            with frozen(swarm, "cleo", whole=whole):
                await swarm.rounds("ann", 3)
            cleo = swarm.status("cleo")["peer_id"]
            after = [head for name in ("ann", "bob") for number, head in swarm.chain(name).items() if number > held + 1]
            assert any(cleo not in head.present for head in after)
            await swarm.until(
                lambda known=held, cleo=cleo: any(
                    cleo in head.present for number, head in swarm.chain("ann").items() if number > known + 3
                ),
                "cleo did not come back",
                READY,
            )
        await swarm.rounds("cleo", 1)
        assert_one_history(swarm, "ann", "bob", "cleo")


async def test_half_go_on_with_the_coordinator_and_wait_without_it(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=MANY, **{"lost-after-seconds": "3600"})
        endpoints = swarm.endpoints
        await swarm.node("ann")
        await swarm.node("bob")
        await swarm.rounds("ann", 4)
        members = {swarm.status(name)["peer_id"] for name in ("ann", "bob")}
        await kill(swarm, "bob")
        await swarm.rounds("ann", 2)
        assert any(head.signers - members for head in swarm.chain("ann").values())  # with the operator's key

        await swarm.restart_member("bob")
        bob = swarm.status("ann")["peer_id"], swarm.round("ann")
        await swarm.until(
            lambda: any(len(head.present) == 2 for number, head in swarm.chain("ann").items() if number > bob[1]),
            "bob did not come back",
            READY,
        )
        await kill(swarm, "coordinator")
        await kill(swarm, "bob")
        failed = swarm.status("ann")["rounds_abandoned"]
        await swarm.until(  # the round under way when bob died is over, whichever way
            lambda: swarm.status("ann")["rounds_abandoned"] >= failed + 2, "ann did not settle", READY
        )
        held, steps = swarm.round("ann"), swarm.status("ann")["steps"]
        await swarm.until(lambda: swarm.status("ann")["steps"] > steps + 100, "ann does not train on", READY)
        assert swarm.round("ann") == held  # nothing is committed by half

        await swarm.start_coordinator(*same_ports(endpoints))
        await swarm.rounds("ann", 1)
        committed = swarm.chain("ann")[held + 1].manifest
        assert sum(item.tokens for item in committed.contributions) > 0
        await swarm.restart_member("bob")
        await swarm.reach("bob", "training")
        await swarm.rounds("bob", 2)
        assert_one_history(swarm, "ann", "bob")
