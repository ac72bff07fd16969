"""Settings of glibc's allocator, each in its own process because they cannot be undone."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys

import pytest

THREADS = 8
_PROGRAM = f"""
import ctypes, threading
{{setup}}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier({THREADS})

def take():
    together.wait()
    libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=take) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_stats()
"""
_SHARED = "from atoll.node.system.malloc_arenas import limit_malloc_arenas\nlimit_malloc_arenas()"


def arenas(setup: str) -> int:
    """Count the arenas from which so many threads allocate."""
    left_out = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    program = [sys.executable, "-c", _PROGRAM.format(setup=setup)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return len(re.findall(r"^Arena \d+:", done.stderr, re.MULTILINE))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="needs glibc")
def test_threads_share_malloc_arenas() -> None:
    assert arenas("") > 2
    assert 0 < arenas(_SHARED) <= 2
