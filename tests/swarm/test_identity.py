"""A data directory that is copied or restored: one identity does not run twice, and does not vote twice."""

import json
import shutil

from support.process_swarm import READY, SWARM_TEST, process_swarm

from atoll.core.errors import ExitCode
from atoll.lab.faults import kill
from atoll.node.state.vote_store import VoteStore

pytestmark = SWARM_TEST
NODES = ("ann", "bob")


async def begin(swarm):
    await swarm.begin(nodes=2, tokens=10_000_000, codec="fp32")
    for name in NODES:
        await swarm.node(name)
    await swarm.rounds("ann", 3)


async def events_of(swarm, kind):
    listed = await swarm.ctl("events")
    return [line for line in listed.splitlines() if kind in line]


def copy_directory(root, name, to):
    """As a backup program does, without what belongs to the process."""
    shutil.copytree(root / name, root / to, ignore=shutil.ignore_patterns("run", "lock", "log", "*.sock"))


async def refused(swarm, name):
    """It ends, as one that may not take part."""
    child = swarm.programs[name].child
    await swarm.until(lambda: child.returncode is not None, f"{name} goes on", READY)
    assert swarm.programs.pop(name).child.returncode == ExitCode.REJECTED


async def test_a_copied_directory_ends_with_the_reason_and_the_first_trains_on(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await begin(swarm)
        copy_directory(tmp_path, "ann", "copy")
        first = swarm.status("ann")
        copy = await swarm.restart_member("copy")
        await swarm.until(lambda: copy.child.returncode is not None, "the copy goes on", READY)
        assert copy.child.returncode == ExitCode.REJECTED
        assert "another process runs with the identity of this node" in (tmp_path / "copy/log").read_text()
        swarm.programs.pop("copy")
        await swarm.rounds("ann", 3)
        status = swarm.status("ann")
        assert (status["pid"], status["state"]) == (first["pid"], "training")
        assert len(await events_of(swarm, "node.identity-in-use")) == 1
        assert not await events_of(swarm, "node.left")
        assert not await events_of(swarm, "node.lost")


async def test_a_new_identity_trains_on_and_the_stolen_one_is_thrown_out(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await begin(swarm)
        copy_directory(tmp_path, "ann", "stolen")
        old = swarm.status("ann")["peer_id"]
        await swarm.stop("ann")
        await swarm.restart_member("stolen")
        await swarm.reach("stolen", "training")
        await swarm.rounds("bob", 2)
        await swarm.command("atoll", "identity", "rotate", "--data-dir", str(tmp_path / "ann"))
        await refused(swarm, "stolen")
        assert "has a new identity" in (tmp_path / "stolen/log").read_text()
        await swarm.restart_member("ann")
        await swarm.reach("ann", "training")
        await swarm.rounds("bob", 2)
        new = swarm.status("ann")["peer_id"]
        assert new != old

        def counted():
            newest = swarm.chain("bob")
            return new in {item.peer_id for item in newest[max(newest)].manifest.contributions}

        await swarm.until(counted, "no round counts the new identity", READY)
        listed = (await swarm.json("node", "list"))["nodes"]
        assert sorted(node["name"] for node in listed) == ["ann", "bob", "seed"]
        assert {node["peer_id"] for node in listed if node["name"] == "ann"} == {new}
        assert len(await events_of(swarm, "node.identity-rotated")) == 1
        await swarm.restart_member("stolen")
        await refused(swarm, "stolen")


async def test_a_seed_with_a_new_identity_is_found_by_those_that_are_there_and_by_newcomers(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await begin(swarm)
        old = swarm.status("seed")["peer_id"]
        await swarm.stop("seed")
        await swarm.command("atoll", "identity", "rotate", "--data-dir", str(tmp_path / "seed"))
        await swarm.restart_member("seed")
        await swarm.reach("seed", "ready")
        new = swarm.status("seed")["peer_id"]
        assert new != old
        saved = tmp_path / "ann/credentials.json"
        await swarm.until(lambda: new in saved.read_text(), "ann has the old address", READY)
        assert all(seed.endswith(new) for seed in json.loads(saved.read_text())["seeds"])
        await swarm.node("cid")
        await swarm.reach("cid", "training")
        await swarm.rounds("cid", 1)


async def test_a_node_that_was_killed_starts_again_at_once_and_is_not_refused(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await begin(swarm)
        for _ in range(2):
            await kill(swarm, "ann")
            await swarm.restart_member("ann")
            await swarm.reach("ann", "training")
            await swarm.rounds("bob", 2)
        assert not await events_of(swarm, "node.identity-in-use")


async def test_a_restored_directory_abstains_until_a_round_counts_it(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await begin(swarm)
        copy_directory(tmp_path, "ann", "backup")
        old = VoteStore(tmp_path / "backup/runs/reef").load()
        await swarm.rounds("ann", 4)
        await kill(swarm, "ann")
        newest = VoteStore(tmp_path / "ann/runs/reef").load()
        assert newest.number > old.number + 1
        shutil.rmtree(tmp_path / "ann")
        (tmp_path / "backup").rename(tmp_path / "ann")
        await swarm.restart_member("ann")
        await swarm.reach("ann", "training")

        def votes_again():
            record = VoteStore(tmp_path / "ann/runs/reef").load()
            return record.complete and record.number > newest.number

        await swarm.until(votes_again, "ann does not vote again", READY)
        chain = swarm.chain("bob")
        restored = VoteStore(tmp_path / "ann/runs/reef").load()
        assert any(item.mark in restored.marks for head in chain.values() for item in head.manifest.contributions)
        assert not await events_of(swarm, "node.identity-in-use")
