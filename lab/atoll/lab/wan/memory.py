"""Memory limits of hosts: one control group for all programs of a host, if the machine has the memory controller.

Otherwise every program has its own limit of allocations (RLIMIT_DATA). That is weaker: it applies per program, and
shared or file-mapped memory does not count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_V2 = Path("/sys/fs/cgroup")
_V1 = _V2 / "memory"
_MIB = 2**20
_REMOVE_SECONDS = 2.0  # a group is busy until the kernel has removed its last process


@dataclass(frozen=True)
class MemoryLimit:
    """Memory limit that a program applies before it starts: it joins a group, or else limits itself."""

    mib: int = 0
    group: Path | None = None

    @property
    def processes_file(self) -> str:
        """File to which a process writes its id to join; empty without a group."""
        return str(self.group / "cgroup.procs") if self.group else ""

    @property
    def data_bytes(self) -> int:
        """Value for RLIMIT_DATA; 0 if a group limits memory or there is no limit."""
        return 0 if self.group else self.mib * _MIB


def limit_hosts(token: str, mib_per_host: Mapping[str, int]) -> dict[str, MemoryLimit]:
    """Create a group for each host with a limit (not 0). Without groups, the programs limit themselves."""
    limits = {}
    for host, mib in mib_per_host.items():
        group = _make_group(f"atoll-{token}", host, mib * _MIB) if mib else None
        limits[host] = MemoryLimit(mib, group)
    return limits


def remove(token: str) -> None:
    """Remove the groups of a token, whose processes have ended."""
    for base in _bases():
        for group in [*(base / f"atoll-{token}").glob("*/"), base / f"atoll-{token}"]:
            deadline = time.monotonic() + _REMOVE_SECONDS
            while group.exists() and time.monotonic() < deadline:
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.02)


def _bases() -> list[Path]:
    """Return directories for groups with a memory limit: version 2's root, or this process's group in version 1."""
    bases = []
    if "memory" in _words(_V2 / "cgroup.subtree_control"):
        bases.append(_V2)
    own = next((line.split(":", 2)[2] for line in _lines(Path("/proc/self/cgroup")) if ":memory:" in line), None)
    if own is not None:
        inside = _V1 / own.lstrip("/")
        bases.append(inside if inside.is_dir() else _V1)
    return bases


def _make_group(parent: str, name: str, limit_bytes: int) -> Path | None:
    for base in _bases():
        version_2 = base == _V2
        group = base / parent / name
        try:
            group.parent.mkdir(exist_ok=True)
            if version_2:
                (group.parent / "cgroup.subtree_control").write_text("+memory")
            group.mkdir()
            (group / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        except OSError:
            continue
        with suppress(OSError):  # the kernel does not count swap, so there is no swap limit
            swap = ("memory.swap.max", 0) if version_2 else ("memory.memsw.limit_in_bytes", limit_bytes)
            (group / swap[0]).write_text(str(swap[1]))
        return group
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]
