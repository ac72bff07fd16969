"""The lab that every test here starts its hosts in."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.swarm_lab import Lab


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose sockets' paths stay below the kernel's limit."""
    path = Path(tempfile.mkdtemp(prefix="atoll-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def lab(short_dir: Path) -> AsyncIterator[Lab]:
    lab = Lab(short_dir)
    yield lab
    await lab.close()
