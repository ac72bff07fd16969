"""How nodes end: SIGTERM at awkward moments, a second one, SIGKILL of every kind of process. Nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from support.process_swarm import GONE, READY, SWARM_TEST, ProcessSwarm, nothing_left, process_swarm, processes_of

from atoll.lab.faults import kill
from atoll.node.control.local_client import call

pytestmark = SWARM_TEST
MANY = 10**9
DRAIN_SECONDS = 120  # the last round's deadline is 30; the rest is goodbyes and a small checkpoint, on a busy machine
AT_ONCE_SECONDS = 25  # without a wait for a round
BIN = Path(sys.executable).parent


def family(pid: int) -> list[psutil.Process]:
    daemon = psutil.Process(pid)
    return [daemon, *daemon.children(recursive=True)]


def is_trainer(process: psutil.Process) -> bool:
    """No more once it has ended, which commands of the launcher do all the time."""
    with contextlib.suppress(psutil.Error):
        return "trainer.worker" in " ".join(process.cmdline())
    return False


async def ends(swarm: ProcessSwarm, name: str, numbers: list[signal.Signals], seconds: float) -> int:
    """Signal a member's daemon; its exit code, once it and all its children are gone in time."""
    program = swarm.programs.pop(name)
    kin, started = family(program.pid), time.monotonic()
    for number in numbers:
        os.kill(program.pid, number)
        await asyncio.sleep(0.05)  # two signals at once may arrive as one
    async with asyncio.timeout(seconds):
        code = await program.child.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, kin, GONE.total_seconds())
    assert not alive, [process.cmdline() for process in alive]
    print(f"{name}: exit {code} after {time.monotonic() - started:.1f} s")
    return code


def in_exchange(swarm: ProcessSwarm, name: str) -> bool:
    it = swarm.status(name)
    return it is not None and it["rounds_joined"] > it["rounds_committed"] + it["rounds_abandoned"]


async def test_sigterm_at_awkward_moments(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=3, tokens=MANY, round_tokens=1500)
        await swarm.node("ann")
        await swarm.until(lambda: "loading" in (swarm.status("ann") or {"detail": ""})["detail"], "not loading", READY)
        assert await ends(swarm, "ann", [signal.SIGTERM], DRAIN_SECONDS) == 0

        await swarm.restart_member("ann")
        await swarm.node("bob", 0.05, "--upload-mbit-per-second", "0.3")  # an exchange takes seconds
        await swarm.node("cleo")
        await swarm.rounds("ann", 1)
        await swarm.until(lambda: in_exchange(swarm, "bob"), "no exchange", READY)
        assert await ends(swarm, "bob", [signal.SIGTERM], DRAIN_SECONDS) == 0
        await swarm.until(lambda: swarm.status("ann")["members"] == 2, "no plan without bob", READY)
        await swarm.rounds("ann", 1)

        coordinator = swarm.programs.pop("coordinator")
        os.kill(coordinator.pid, signal.SIGKILL)
        await coordinator.child.wait()
        assert await ends(swarm, "ann", [signal.SIGTERM], DRAIN_SECONDS) == 0
        code = await ends(swarm, "cleo", [signal.SIGTERM, signal.SIGTERM], AT_ONCE_SECONDS)
        assert code in (128 + signal.SIGTERM, -signal.SIGTERM)  # the same to a shell: 143
        shutil.rmtree(tmp_path / "cleo")  # with the sockets that she had no time to remove

        os.kill(swarm.programs["seed"].pid, signal.SIGSTOP)  # a seed that does not answer
        await swarm.restart_member("ann")
        await swarm.until(lambda: swarm.status("ann") is not None, "ann does not answer", READY)
        assert await ends(swarm, "ann", [signal.SIGTERM], DRAIN_SECONDS) == 0
        os.kill(swarm.programs["seed"].pid, signal.SIGCONT)
        assert await ends(swarm, "seed", [signal.SIGTERM], DRAIN_SECONDS) == 0


async def test_who_is_left_behind_does_not_wait_for_a_round_that_cannot_come(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=3, tokens=MANY, **{"lost-after-seconds": "5"})
        for name in ("ann", "bob", "cleo"):
            await swarm.node(name)
        await swarm.rounds("cleo", 2)
        await asyncio.gather(*(kill(swarm, name) for name in ("ann", "bob")))
        async with asyncio.timeout(READY.total_seconds()):  # there is no plan without the dead: nobody could decide
            while "no majority" not in (await swarm.json("run", "show", "reef"))["run"].get("missing", ""):
                await asyncio.sleep(0.5)
        assert await ends(swarm, "cleo", [signal.SIGTERM], AT_ONCE_SECONDS) == 0
        for name in ("ann", "bob"):
            shutil.rmtree(tmp_path / name)  # with the sockets that they had no time to remove


async def test_finish_waits_for_the_round_and_a_restart_rests(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=2, tokens=MANY, round_tokens=30_000)  # rounds of several seconds
        for name in ("ann", "bob", "cleo"):
            await swarm.node(name)
        await swarm.rounds("bob", 1)
        before = swarm.round("bob")
        assert call(tmp_path / "bob", "finish")["leaving"]
        assert await ends(swarm, "bob", [], DRAIN_SECONDS) == 0
        kept = [int(path.name) for path in (tmp_path / "bob/runs/reef/checkpoints").iterdir()]
        assert max(kept) > before  # what it had trained went into a round
        await swarm.restart_member("bob")
        await swarm.reach("bob", "paused")
        assert "finished by its owner" in swarm.status("bob")["detail"]


async def test_pauses_and_limits_of_a_real_node_last_over_a_restart(tmp_path):
    async with process_swarm(tmp_path) as swarm:
        await swarm.begin(nodes=1, tokens=MANY)
        await swarm.node("ann")
        await swarm.rounds("ann", 1)
        ann = tmp_path / "ann"
        answer = call(ann, "set", READY, limits={"minimum_step_seconds": "0.2", "cpu_threads": "1"})
        assert answer["limits"]["minimum_step_seconds"]["value"] == 0.2
        await swarm.until(lambda: swarm.status("ann")["step_seconds"] >= 0.2, "not slower", READY)

        call(ann, "pause")
        await swarm.reach("ann", "paused")
        await swarm.stop("ann")
        kept = ann / "runs" / "reef" / "optimizer.state"
        newest = max(path.stat().st_mtime_ns for path in (ann / "runs" / "reef" / "checkpoints").rglob("*"))
        assert newest <= kept.stat().st_mtime_ns  # if time or disk space runs out, the checkpoint is there
        await swarm.restart_member("ann")
        await swarm.reach("ann", "paused")
        assert swarm.status("ann")["detail"] == "paused by its owner"
        call(ann, "set", READY, limits={"hours": _not_now()})
        assert call(ann, "resume")["paused"]
        assert "outside its hours" in swarm.status("ann")["detail"]
        assert not call(ann, "resume", force=True)["paused"]
        await swarm.reach("ann", "training")
        await swarm.until(lambda: swarm.status("ann")["step_seconds"] >= 0.2, "its pace was forgotten", READY)
        assert "optimiser's state restored" in (ann / "log").read_text()
        assert not kept.exists()

        p2pd = next(it for it in family(swarm.programs["ann"].pid) if "p2pd" in it.name())
        program = swarm.programs.pop("ann")
        kin = family(program.pid)
        p2pd.kill()
        async with asyncio.timeout(DRAIN_SECONDS):
            assert await program.child.wait() == 75
        assert not (await asyncio.to_thread(psutil.wait_procs, kin, GONE.total_seconds()))[1]
        assert await ends(swarm, "seed", [signal.SIGKILL], DRAIN_SECONDS) == -signal.SIGKILL
        shutil.rmtree(tmp_path / "seed")


def test_a_killed_launcher_takes_everything_with_it(tmp_path):
    command = [BIN / "atoll", "demo", "--tokens", "100000000", "--keep", tmp_path / "kept"]
    with nothing_left(tmp_path):
        with (tmp_path / "out").open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as launcher:
            deadline = time.monotonic() + READY.total_seconds()
            while sum(map(is_trainer, processes_of(tmp_path))) < 2:
                assert time.monotonic() < deadline, (tmp_path / "out").read_text()
                assert launcher.poll() is None
                time.sleep(0.2)
            launcher.kill()
        for path in (tmp_path / "kept").rglob("*.sock"):
            path.unlink()  # files of the killed stay; no process does
        _, alive = psutil.wait_procs(processes_of(tmp_path), timeout=GONE.total_seconds())
        assert not alive, [process.cmdline() for process in alive]


def _not_now() -> str:
    """A window of an hour that begins in six."""
    hour = (time.localtime().tm_hour + 6) % 24
    return f"{hour:02d}:00-{(hour + 1) % 24:02d}:00"
