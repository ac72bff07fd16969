"""Where the programs run that Atoll is measured beside: `make peers` builds their pinned environments."""

from __future__ import annotations

import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "peers"
_ENVIRONMENTS = Path(__file__).parent.parent / ".make" / "peers"


def python_of(method: str) -> str:
    """The interpreter for a method (`PEER` or `PEER-VARIANT`): its own, or ours if it needs none.

    Raises `RuntimeError`.
    """
    peer = method.partition("-")[0]
    if not (REQUIREMENTS / f"{peer}.txt").exists():
        return sys.executable
    folder = _ENVIRONMENTS / peer
    if not (folder / "ready").exists():
        raise RuntimeError("make peers")
    return str(folder / "bin" / "python")
