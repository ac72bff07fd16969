"""A daemon in the background: it outlives its terminal, and its log has all that a terminal would show."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import psutil
from integration.coordinator.lab import coordinator
from integration.node.test_wrong_starts import BIN, start_of
from support.eventually import eventually

from atoll.core.errors import AtollError
from atoll.node.control.local_client import call


async def _printed(*arguments: object) -> str:
    child = await asyncio.create_subprocess_exec(
        BIN / "atoll", *map(str, arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(120):
        printed, _ = await child.communicate()
    return printed.decode()


def _state(data_dir: Path) -> str:
    try:
        return str(call(data_dir, "status")["state"])
    except AtollError:
        return ""


async def test_a_detached_node_outlives_a_hangup_and_is_stopped_like_any_other(tmp_path: Path) -> None:
    with ExitStack() as undo:
        async with coordinator(tmp_path / "c") as home:
            start = await start_of(tmp_path, home, "", undo)
            start.flags.pop("--base")
            code, told = await start.run("join", "--detach")
            assert code == 0, told
            pid = int(call(start.data_dir, "status")["pid"])
            daemon = psutil.Process(pid)
            try:
                assert f"runs in the background (process {pid})" in told
                assert os.getsid(pid) == pid
                await eventually(lambda: _state(start.data_dir) == "ready", 120)
                family = [daemon, *daemon.children(recursive=True)]
                assert len(family) >= 3  # p2pd and the trainer, too
                for process in family:
                    process.send_signal(signal.SIGHUP)
                await asyncio.sleep(1)
                assert all(process.is_running() and process.status() != "zombie" for process in family)
                assert _state(start.data_dir) == "ready"
                lines = (await _printed("logs", "--data-dir", start.data_dir)).splitlines()
                assert "joined the swarm" in [json.loads(line)["event"] for line in lines if line.startswith("{")]
                daemon.send_signal(signal.SIGTERM)
                await eventually(lambda: not daemon.is_running() or daemon.status() == "zombie", 120)
                (node,) = home.controller.state.nodes.values()
                assert (node.left, node.ended, node.ended_detail) == (True, "STOPPED", "stopped by SIGTERM")
            finally:
                for process in [daemon] if daemon.is_running() else []:
                    process.kill()


async def test_a_detached_start_that_fails_says_so_on_the_terminal(tmp_path: Path) -> None:
    with ExitStack() as undo:
        async with coordinator(tmp_path / "c") as home:
            start = await start_of(tmp_path, home, "", undo)
            start.flags.pop("--base")
            code, told = await start.run("up", "--detach")
            assert (code, "ended at once" in told, "has not joined a run" in told) == (2, True, True), told
