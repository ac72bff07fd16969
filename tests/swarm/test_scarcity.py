"""A node that runs out of disk, of permission to write, of file descriptors: it says so and trains on."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from pathlib import Path

import psutil
import pytest
from support.process_swarm import READY, SWARM_TEST, ProcessSwarm, process_swarm

from atoll.node.state.checkpoint import read_checkpoint

pytestmark = [
    *SWARM_TEST,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root"),
]
MANY = 10**9


@contextlib.contextmanager
def small_disk(path: Path):
    path.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m,mode=0700", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def full(path: Path):
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        for block in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(block)) == block:
                    pass
    yield
    filler.unlink()


@contextlib.contextmanager
def read_only(path: Path):
    """From here on no name below it can be made, changed or removed; files that are open stay writable."""
    subprocess.run(["mount", "--bind", path, path], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def few_descriptors(pid: int):
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def newest_checkpoint(root: Path):
    directory = root / "ann/runs/reef/checkpoints"
    return read_checkpoint(max(path for path in directory.iterdir() if path.name.isdecimal())).head


async def trains_on(swarm: ProcessSwarm, more_rounds: int) -> None:
    """Not only steps: rounds that the others commit are taken in."""
    steps = swarm.status("ann")["steps"]
    await swarm.rounds("ann", more_rounds)
    assert swarm.status("ann")["steps"] > steps


async def writes_again(swarm: ProcessSwarm, root: Path, known: int) -> None:
    await swarm.until(lambda: newest_checkpoint(root).round > known, "no new checkpoint", READY)
    await swarm.until(lambda: not swarm.status("ann")["warnings"], "it still complains", READY)


async def test_a_node_in_want_trains_on_and_recovers(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_CHECKPOINT_INTERVAL_SECONDS", "0")
    with small_disk(tmp_path / "ann"):
        async with process_swarm(tmp_path) as swarm:
            await swarm.begin(nodes=3, tokens=MANY, round_tokens=1500)
            for name in ("ann", "bob", "cleo"):
                await swarm.node(name)
            await swarm.rounds("ann", 3)
            daemon = psutil.Process(swarm.programs["ann"].pid)

            ann = swarm.status("ann")["peer_id"]
            with full(tmp_path / "ann"):
                began = max(swarm.chain("bob"))
                await swarm.until(lambda: bool(swarm.status("ann")["warnings"]), "a full disk went unnoticed", READY)
                assert any("No space left" in warning for warning in swarm.status("ann")["warnings"])
                known = newest_checkpoint(tmp_path).round  # whole, though later ones did not fit
                await trains_on(swarm, 3)
                assert newest_checkpoint(tmp_path).round == known
                since = [head for number, head in swarm.chain("bob").items() if number > began + 1]
                assert any(ann in {item.peer_id for item in head.manifest.contributions} for head in since)
                assert not any(ann in head.present for head in since)
            await writes_again(swarm, tmp_path, known)

            with read_only(tmp_path / "ann"):
                await swarm.until(lambda: bool(swarm.status("ann")["warnings"]), "read-only went unnoticed", READY)
                assert any("Read-only file system" in warning for warning in swarm.status("ann")["warnings"])
                known = newest_checkpoint(tmp_path).round
                await trains_on(swarm, 3)
                assert newest_checkpoint(tmp_path).round == known
            await writes_again(swarm, tmp_path, known)

            with few_descriptors(daemon.pid):
                await swarm.rounds("bob", 3)  # the others go on
                assert daemon.is_running()
            await trains_on(swarm, 2)
            await writes_again(swarm, tmp_path, newest_checkpoint(tmp_path).round)
            assert swarm.status("ann")["trainer_restarts"] == 0
