"""A data directory that is copied or restored: one identity does not run twice, and does not vote twice."""

import shutil

import pytest
from support.process_swarm import READY, process_swarm

from atoll.core.errors import ExitCode
from atoll.lab.faults import kill
from atoll.node.state.vote_store import VoteStore

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
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
