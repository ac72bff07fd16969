"""The limit of open files."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import resource, sys
from atoll.core.files import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(raise_descriptor_limit(int(sys.argv[3])), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "most", "found"), [(64, 256, 1000, 256), (64, 256, 128, 128), (200, 256, 128, 200)]
)
def test_the_descriptor_limit_rises_to_what_the_system_allows_and_never_falls(
    soft: int, hard: int, most: int, found: int
) -> None:
    """In a process of its own: a hard limit cannot be raised again."""
    numbers = [str(number) for number in (soft, hard, most)]
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *numbers], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(found), str(found)], done.stderr
