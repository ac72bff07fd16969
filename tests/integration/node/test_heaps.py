"""What glibc makes of what we ask; in a process of its own each, since it cannot be taken back."""

from __future__ import annotations

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
_SHARED = "from atoll.node.heaps import share_heaps\nshare_heaps()"


def heaps(asked: str) -> int:
    """That so many threads allocate from."""
    told = subprocess.run(
        [sys.executable, "-c", _HEAPS.format(asked=asked)], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    return len(re.findall(r"^Arena \d+:", told.stderr, re.MULTILINE))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_threads_share_heaps() -> None:
    assert heaps("") > 2
    assert 0 < heaps(_SHARED) <= 2
