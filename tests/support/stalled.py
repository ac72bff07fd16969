"""Run a command while its machine is busy and stands still now and then: `python -m support.stalled COMMAND …`.

`stress-ng --cpu 4` takes the processor. Every few seconds one process of the command's tree, drawn at random, is
stopped for two seconds and goes on. Tests that pass so don't depend on how fast anything is. Exits with the command's
status.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import psutil

BURNERS = 4
STALL_SECONDS = 2.0
BETWEEN_SECONDS = (1.0, 6.0)
END_SECONDS = 10.0


def stall_now_and_then(root: psutil.Process, done: threading.Event, draw: random.Random) -> int:
    """Stop and continue one process of the tree after another until `done` is set. Return how many were stopped."""
    stopped = 0
    while not done.wait(draw.uniform(*BETWEEN_SECONDS)):
        try:
            family = [root, *root.children(recursive=True)]
            victim = draw.choice([process for process in family if process.status() != psutil.STATUS_ZOMBIE])
            if victim.status() == psutil.STATUS_STOPPED:  # a test stopped it, and it is the test that lets it go on
                continue
            victim.suspend()
        except (psutil.NoSuchProcess, IndexError):  # it has ended, or all have
            continue
        stopped += 1
        done.wait(STALL_SECONDS)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()
    return stopped


@contextlib.contextmanager
def busy_processors() -> Iterator[None]:
    """Keep the processors busy for as long as the block runs."""
    program = shutil.which("stress-ng")
    if program is None:
        raise SystemExit("stress-ng is not installed")
    burners = subprocess.Popen([program, "--cpu", str(BURNERS), "--quiet"], start_new_session=True)
    try:
        yield
    finally:
        burners.terminate()
        burners.wait(END_SECONDS)


def main(command: Sequence[str]) -> int:
    """Run `command` so; the seed of the draws is printed and can be set as `STALL_SEED`."""
    seed = int(os.environ.get("STALL_SEED", random.randrange(2**31)))
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is started here ends, too
    with busy_processors():
        child = subprocess.Popen(command)
        counted: list[int] = []
        stalls = threading.Thread(
            target=lambda: counted.append(stall_now_and_then(psutil.Process(child.pid), done, random.Random(seed)))
        )
        stalls.start()
        try:
            status = child.wait()
        finally:
            done.set()
            stalls.join()
            if child.poll() is None:
                child.terminate()
                child.wait(END_SECONDS)
    print(f"stalled {counted[0]} times for {STALL_SECONDS:g} s, STALL_SEED={seed}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
