"""Children die with their parent, and stop when told."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from atoll.core.identity import Identity
from atoll.node.system import child_processes

SLEEP = "/bin/sleep"
DIE_WITH_PARENT = """
import asyncio, pathlib, sys
from datetime import timedelta
from atoll.node.swarm.p2pd import P2pd, P2pdConfig

async def main():
    directory = pathlib.Path(sys.argv[1])
    config = P2pdConfig(directory / "key", directory, ("/ip4/127.0.0.1/tcp/0",), (), False, ())
    daemon = await P2pd.start(config, timedelta(seconds=120))
    sys.stderr.write(f"pid {daemon.pid}\\n")
    await asyncio.Event().wait()

asyncio.run(main())
"""


def wait_gone(pid: int, seconds: float = 60) -> bool:
    """Tell whether the process ended in time; its pidfd becomes readable then."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def test_p2pd_dies_with_a_parent_that_is_killed(short_dir: Path) -> None:
    Identity.load_or_create(short_dir / "key")
    parent = subprocess.Popen(
        [sys.executable, "-c", DIE_WITH_PARENT, short_dir],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    with parent:
        assert parent.stderr is not None
        pid = next(int(line.split()[1]) for line in parent.stderr if line.startswith("pid "))
        assert "p2pd" in Path(f"/proc/{pid}/cmdline").read_text()
        parent.kill()
    assert wait_gone(pid)


async def test_stop_asks_first_and_insists_after_the_grace() -> None:
    child = await child_processes.start([SLEEP, "600"], environment={})
    assert os.getpgid(child.pid) == child.pid
    assert await child_processes.stop(child, timedelta(seconds=60)) == -signal.SIGTERM
    assert await child_processes.stop(child, timedelta(seconds=60)) == -signal.SIGTERM

    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    child = await child_processes.start(
        [sys.executable, "-c", stubborn], environment={}, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    await child.stdout.readline()
    assert await child_processes.stop(child, timedelta(milliseconds=100)) == -signal.SIGKILL


def test_a_child_does_not_start_if_its_parent_has_ended_before(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    command = child_processes.command_killed_with_parent(
        ["/bin/touch", witness], parent_pid=1 if os.getpid() != 1 else 2
    )
    assert subprocess.run(command, check=False).returncode == 1
    assert not witness.exists()
