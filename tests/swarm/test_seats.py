"""Eight real nodes whose openers are killed one after another, without a coordinator: seats move to those that live."""

from datetime import timedelta

from support.process_swarm import SWARM_TEST, process_swarm

from atoll.lab.faults import kill, same_ports

pytestmark = SWARM_TEST
NAMES = [f"node-{number}" for number in range(8)]
PATIENCE = timedelta(seconds=600)  # eight nodes share the cores with everything else


async def test_four_of_eight_die_one_after_another_and_rounds_go_on_without_the_coordinator(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=8, tokens=10**9, **{"lost-after-seconds": "3600"})
        endpoints = swarm.endpoints
        for name in NAMES:
            await swarm.node(name, pace=0.5)
        for name in NAMES:
            await swarm.reach(name, "training")
        peers = {swarm.status(name)["peer_id"]: name for name in NAMES}

        def newest(name):
            known = swarm.chain(name)
            return known[max(known)]

        await swarm.until(
            lambda: swarm.round(NAMES[0]) > 0 and newest(NAMES[0]).present == peers.keys(),
            "the eight never were in one round",
            PATIENCE,
        )
        await kill(swarm, "coordinator")
        alive = list(NAMES)
        for _ in range(4):
            head = newest(alive[0])
            victim = next(peers[seat] for seat in head.seats if peers.get(seat) in alive)
            await kill(swarm, victim)
            alive.remove(victim)
            reached = swarm.round(alive[0])
            await swarm.until(
                lambda reached=reached, watcher=alive[0]: swarm.round(watcher) >= reached + 2,
                f"no round without {victim}",
                PATIENCE,
            )
        await swarm.until(
            lambda: {peers.get(seat) for seat in newest(alive[0]).seats} & set(NAMES) == set(alive),
            "the seats did not come to those that live",
            PATIENCE,
        )

        await swarm.start_coordinator(*same_ports(endpoints))
        for name in set(NAMES) - set(alive):
            await swarm.restart_member(name)
        await swarm.until(lambda: newest(alive[0]).present == peers.keys(), "not all came back", PATIENCE)
        chains = [swarm.chain(name) for name in NAMES]
        for number in {number for known in chains for number in known}:
            assert len({known[number].hash for known in chains if number in known}) == 1, f"round {number}"
