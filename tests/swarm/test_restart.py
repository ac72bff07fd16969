"""Whole swarms that stop, or are killed, and start again go on from what was committed."""

import asyncio
from contextlib import ExitStack

from support.process_swarm import READY, SWARM_TEST, process_swarm

from atoll.core.manifest import Head
from atoll.lab.faults import frozen, kill, same_ports
from atoll.node.state.checkpoint import read_checkpoint
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore

pytestmark = SWARM_TEST
NODES = ("ann", "bob")
TOKENS = 60_000  # twenty rounds, each of more than a second: a busy machine still finds a moment to kill all
PACE = 0.1


def on_disk(root, name):
    """The newest checkpoint's head."""
    directory = root / name / "runs/reef/checkpoints"
    return read_checkpoint(max(path for path in directory.iterdir() if path.name.isdecimal())).head


def decided_on(root, name):
    """The newest round that a node voted for, by what is on its disk."""
    record = VoteStore(root / name / "runs/reef").load()
    return record.number if record.voted is not None else record.number - 1


async def kill_all(swarm, root):
    """When a checkpoint holds what was voted for: else its state is lost with all, and it takes an operator."""
    async with asyncio.timeout(READY.total_seconds()):
        while True:
            with ExitStack() as still:
                for name in NODES:
                    still.enter_context(frozen(swarm, name, whole=False))
                newest = max((on_disk(root, name) for name in NODES), key=lambda head: head.round)
                assert newest.committed_tokens < TOKENS, "the run ended before a moment came"
                if newest.round >= max(decided_on(root, name) for name in NODES):
                    await kill(swarm, *NODES, "seed", "coordinator")
                    return newest
            await asyncio.sleep(0.05)


async def start_again(swarm):
    """Everything on the port of the last time, the nodes before the seed that they wait for."""
    await swarm.start_coordinator(*same_ports(swarm.endpoints))
    for name in (*NODES, "seed"):
        await swarm.restart_member(name)


def manifest_on_disk(root, number):
    """Of whichever node has it: one that comes back a little late misses a round that the other commits."""
    stores = [ManifestStore(root / name / "runs/reef/manifests", "reef") for name in NODES]
    found = {kept.payload for store in stores if (kept := store.get(number)) is not None}
    assert len(found) < 2
    return next((kept for store in stores if (kept := store.get(number)) is not None), None)


async def finish(swarm, root, stopped):
    """Train to the end; one history, which goes through `stopped`, and every token counted once."""
    for name in NODES:
        await swarm.reach(name, "finished")
    assert swarm.anchor_digest("ann") == swarm.anchor_digest("bob")
    newest = [ManifestStore(root / name / "runs/reef/manifests", "reef").newest().hash for name in NODES]
    before, after = stopped, Head(manifest_on_disk(root, stopped.round + 1))
    while True:
        assert after.manifest.previous_hash == before.hash
        assert after.committed_tokens > before.committed_tokens
        found = manifest_on_disk(root, after.round + 1)
        if found is None:
            break
        before, after = after, Head(found)
    assert {after.hash} == set(newest)
    assert after.committed_tokens >= TOKENS


async def test_a_swarm_that_was_stopped_in_order_goes_on_from_its_last_round(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=TOKENS, codec="fp32")
        for name in NODES:
            await swarm.node(name, PACE)
        await swarm.rounds("ann", 4)
        peers = {name: swarm.status(name)["peer_id"] for name in NODES}
        await swarm.stop(*NODES)
        await swarm.stop("seed", "coordinator")
        first, last = sorted((on_disk(tmp_path, name) for name in NODES), key=lambda head: head.round)
        for name in NODES:  # each leaves with a round that counts it
            assert peers[name] in {item.peer_id for item in on_disk(tmp_path, name).manifest.contributions}
        await start_again(swarm)
        await finish(swarm, tmp_path, first)
        assert Head(manifest_on_disk(tmp_path, last.round)).hash == last.hash


async def test_a_swarm_that_was_killed_goes_on_from_its_newest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_CHECKPOINT_INTERVAL_SECONDS", "0")
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=TOKENS, codec="fp32")
        for name in NODES:
            await swarm.node(name, PACE)
        await swarm.rounds("ann", 4)
        newest = await kill_all(swarm, tmp_path)
        await start_again(swarm)
        await finish(swarm, tmp_path, newest)
