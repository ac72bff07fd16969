"""What glibc makes of what we ask; in a process of its own each, since it cannot be taken back."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys

import pytest

THREADS = 8
_HEAPS = f"""
import ctypes, threading
{{asked}}
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


def heaps(asked: str) -> int:
    """That so many threads allocate from."""
    left_out = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    program = [sys.executable, "-c", _HEAPS.format(asked=asked)]
    told = subprocess.run(program, capture_output=True, text=True, timeout=60, env=environment)
    assert told.returncode == 0, told.stderr
    return len(re.findall(r"^Arena \d+:", told.stderr, re.MULTILINE))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="needs glibc")
def test_threads_share_malloc_arenas() -> None:
    assert heaps("") > 2
    assert 0 < heaps(_SHARED) <= 2
