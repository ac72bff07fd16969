"""A new certificate authority in a swarm that trains: nobody loses a round, and a killed coordinator goes on."""

import asyncio
import json

import pytest
from support.process_swarm import READY, SWARM_TEST, process_swarm

from atoll.core.certs import split_pem
from atoll.core.errors import AtollError, ExitCode
from atoll.lab.faults import kill, same_ports

pytestmark = SWARM_TEST
NODES = ("ann", "bob")


def saved(root, name):
    return json.loads((root / name / "credentials.json").read_text())


def issued_by_newest(root, name):
    known = saved(root, name)
    newest = split_pem(known["ca_pem"].encode())[0]
    return known["tls_chain_pem"].encode().endswith(newest)


def trusted_by(root, name):
    return len(split_pem(saved(root, name)["ca_pem"].encode()))


def newest(swarm, name):
    known = swarm.chain(name)
    return known[max(known)]


async def restart_killed(swarm):
    await kill(swarm, "coordinator")
    await swarm.start_coordinator(*same_ports(swarm.endpoints))


async def test_members_move_while_they_train_and_one_that_was_away_joins_again(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=10_000_000, codec="fp32")
        for name in (*NODES, "away"):
            await swarm.node(name)
        await swarm.rounds("ann", 2)
        peer = swarm.status("away")["peer_id"]
        await swarm.stop("away")
        await swarm.rounds("ann", 2)
        before = {name: swarm.status(name) for name in NODES}

        (old,) = (await swarm.json("ca", "show"))["authorities"]["trusted"]
        await swarm.json("ca", "rotate", "--overlap", "1h")
        await restart_killed(swarm)
        everyone = (*NODES, "seed")
        await swarm.until(
            lambda: all(trusted_by(tmp_path, name) == 2 and issued_by_newest(tmp_path, name) for name in everyone),
            "not everybody moved",
            READY,
        )
        async with asyncio.timeout(READY.total_seconds()):
            while (view := (await swarm.json("ca", "show"))["authorities"])["waiting"] != ["away"]:
                await asyncio.sleep(0.2)
        assert [item["members"] for item in view["trusted"]] == [3, 1]
        assert view["trusted"][1]["sha256"] == old["sha256"]
        with pytest.raises(AtollError, match="away"):
            await swarm.ctl("ca", "retire")
        await swarm.ctl("ca", "retire", "--force")
        await restart_killed(swarm)
        await swarm.until(lambda: all(trusted_by(tmp_path, name) == 1 for name in everyone), "the old one stays", READY)
        everybody = {before[name]["peer_id"] for name in NODES}
        await swarm.until(lambda: newest(swarm, "ann").present == everybody, "no round of both", READY)
        await swarm.rounds("ann", 3)
        for name in NODES:
            after = swarm.status(name)
            assert after["pid"] == before[name]["pid"]
        assert not [line for line in (await swarm.ctl("events")).splitlines() if "node.lost" in line]

        back = await swarm.restart_member("away")
        await swarm.until(lambda: back.child.returncode is not None, "it goes on", READY)
        assert swarm.programs.pop("away").child.returncode == ExitCode.REJECTED
        assert "replaced its certificate authority while this node was away" in (tmp_path / "away/log").read_text()
        await swarm.node("away")
        await swarm.reach("away", "training")
        assert swarm.status("away")["peer_id"] == peer
