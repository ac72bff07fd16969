"""Members come and go while training goes on: late joiners, pauses, drains, bans, crashes."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
from support.process_swarm import GONE, READY, SWARM_TEST, process_swarm, processes_of

from atoll.node.control.local_client import call
from atoll.node.state.manifests import ManifestStore
from atoll.v1 import manifest_pb2

pytestmark = SWARM_TEST
MANY = 10**9


def tokens_in_last_round(data_dir: Path, peer: str) -> int:
    """Tokens of a member in the round after which the others decide without it."""
    kept = ManifestStore(data_dir / "runs/reef/manifests", "reef")
    newest = kept.newest()
    assert newest is not None
    there = [found for number in range(1, newest.round + 1) if (found := kept.get(number)) is not None]
    rounds = [manifest_pb2.Manifest.FromString(committed.payload) for committed in there]
    own = [item for made in rounds for item in made.contributions if item.peer_id == peer]
    return next(item.tokens for item in own if not item.present)


async def test_join_late_pause_resume_drain_and_ban(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=MANY)
        await swarm.node("ann")
        await swarm.node("bob")
        await swarm.rounds("ann", 2)

        await swarm.node("cleo")  # fetches anchor and momentum, then takes part
        await swarm.reach("cleo", "training")
        await swarm.rounds("cleo", 2)
        await swarm.until(lambda: swarm.status("ann")["members"] == 3, "no plan with three", READY)
        assert swarm.round("cleo") > 0

        call(tmp_path / "bob", "pause")
        await swarm.reach("bob", "paused")
        await swarm.until(lambda: swarm.status("ann")["members"] == 2, "no plan without bob", READY)
        assert tokens_in_last_round(tmp_path / "bob", swarm.status("bob")["peer_id"]) > 0
        held = swarm.status("bob")["steps"]
        await swarm.rounds("ann", 2)
        assert swarm.status("bob")["steps"] == held
        call(tmp_path / "bob", "resume")
        await swarm.reach("bob", "training")
        await swarm.until(lambda: swarm.status("bob")["steps"] > held, "bob does not train again", READY)

        await swarm.ctl("node", "drain", "cleo")
        cleo = swarm.programs.pop("cleo")
        assert await cleo.child.wait() == 0
        await swarm.rounds("ann", 2)

        await swarm.ctl("node", "ban", "bob", "--yes")
        bob = swarm.programs.pop("bob")
        assert await bob.child.wait() == 77
        await swarm.rounds("ann", 2)
        nodes = (await swarm.json("node", "list"))["nodes"]
        assert {node["name"]: node["banned"] for node in nodes}["bob"] is True


async def test_nothing_outlives_a_killed_daemon_and_the_others_go_on(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=3, tokens=MANY, **{"lost-after-seconds": "3"})
        for name in ("ann", "bob", "cleo"):
            await swarm.node(name)
        await swarm.rounds("ann", 2)

        victim = swarm.programs.pop("cleo")
        family = psutil.Process(victim.pid).children(recursive=True)
        assert len(family) >= 2  # p2pd and the trainer
        os.kill(victim.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=GONE.total_seconds())
        assert not alive
        await victim.child.wait()
        await swarm.until(lambda: swarm.status("ann")["members"] == 2, "no plan without cleo", READY)
        await swarm.rounds("ann", 2)
        await swarm.rounds("bob", 1)

        await swarm.restart_member("cleo")  # no token, the settings of before
        await swarm.until(lambda: swarm.status("ann")["members"] == 3, "cleo did not come back", READY)
        await swarm.reach("cleo", "training")
        await swarm.rounds("cleo", 2)


async def test_a_killed_trainer_costs_a_restart_not_the_membership(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=MANY)
        await swarm.node("ann")
        await swarm.node("bob")
        await swarm.rounds("ann", 2)
        daemon = psutil.Process(swarm.programs["bob"].pid)
        trainers = [c for c in daemon.children(recursive=True) if any("trainer.worker" in w for w in c.cmdline())]
        trainers[0].kill()
        await swarm.until(lambda: swarm.status("bob")["trainer_restarts"] == 1, "no restart", READY)
        await swarm.reach("bob", "training")
        await swarm.rounds("bob", 2)
        assert daemon.is_running()


async def test_training_goes_on_while_the_coordinator_is_dead(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=MANY)
        ports = _ports(tmp_path)
        await swarm.node("ann")
        await swarm.node("bob")
        await swarm.rounds("ann", 2)
        coordinator = swarm.programs.pop("coordinator")
        os.kill(coordinator.pid, signal.SIGKILL)
        await coordinator.child.wait()
        assert not [p for p in processes_of(tmp_path / "coordinator") if p.pid == coordinator.pid]
        await swarm.rounds("ann", 3)

        await swarm.start_coordinator(*ports)
        await swarm.until(lambda: swarm.status("ann")["coordinator_connected"], "did not reconnect", READY)
        head = swarm.round("ann")
        await swarm.rounds("ann", 1)
        async with asyncio.timeout(READY.total_seconds()):  # openers tell theirs in any order
            while True:
                run = (await swarm.json("run", "show", "reef"))["run"]
                if run["rounds_committed"] == run["head_round"]:  # those decided while it was dead arrived too
                    break
                await asyncio.sleep(0.5)
        assert run["head_round"] >= head
        plan = (await swarm.json("plan", "show"))["plan"]
        assert plan["version"] == 1


async def test_sigterm_drains_within_its_deadline(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=MANY, round_tokens=1500)
        await swarm.node("ann")
        await swarm.node("bob")
        await swarm.rounds("bob", 1)
        held, bob_id = swarm.round("bob"), swarm.status("bob")["peer_id"]
        bob = swarm.programs.pop("bob")
        bob.child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(READY.total_seconds()):
            assert await bob.child.wait() == 0
        last = ManifestStore(tmp_path / "bob/runs/reef/manifests", "reef").newest()
        (own,) = [item.tokens for item in last.manifest.contributions if item.peer_id == bob_id]
        assert last.round > held  # what it had trained was committed before it left
        assert own > 0
        await swarm.until(lambda: swarm.status("ann")["members"] == 1, "no plan without bob", READY)
        await swarm.rounds("ann", 2)
        call(tmp_path / "ann", "leave", READY)
        ann = swarm.programs.pop("ann")
        assert await ann.child.wait() == 0


def _ports(root: Path) -> list[str]:
    import json

    endpoints = json.loads((root / "coordinator" / "endpoints.json").read_text())
    http = endpoints["http"].rstrip("/").rpartition(":")[2]
    enrol, member = (endpoints[name].rpartition(":")[2] for name in ("enrolment", "membership"))
    return ["--enrol-port", enrol, "--member-port", member, "--http-port", http]
