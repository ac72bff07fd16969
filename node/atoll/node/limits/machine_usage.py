"""What a machine says about itself: battery or mains, who else uses it. What is absent objects to nothing.

"In use" means one of two things. Others' programs took the processor: /proc/stat, less the daemon and its descendants,
above `IN_USE_CORES` over the time since the last look. Or somebody sits at it: logind's IdleHint, which desktops
keep and which counts terminals, asked through `loginctl` where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

POWER_SUPPLIES = Path("/sys/class/power_supply")
PROC = Path("/proc")
IN_USE_CORES = 0.5  # of processor time a second: more than a desktop at rest, less than anything that computes
_LOGINCTL_TIMEOUT = timedelta(seconds=3)
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal


def on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """Whether the machine runs on its own battery now; a mouse's battery does not count."""
    try:
        kinds = {path: _read_word(path / "type") for path in supplies.iterdir()}
    except OSError:
        return False
    if any(_read_word(path / "online") == "1" for path, kind in kinds.items() if kind in ("Mains", "USB", "Wireless")):
        return False
    return any(
        _read_word(path / "status") == "Discharging" and _read_word(path / "scope") != "Device"
        for path, kind in kinds.items()
        if kind in ("Battery", "UPS")
    )


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of processor time since boot: everybody's, and by process with its parent."""

    busy: float
    processes: dict[int, tuple[int, float]]  # pid → parent, user and system seconds


def cpu_times(proc: Path = PROC) -> CpuTimes:
    """Raises `OSError`, `ValueError` where the kernel is not Linux."""
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    columns = (proc / "stat").read_text().splitlines()[0].split()[1:]
    return CpuTimes(sum(int(columns[i]) for i in _BUSY_COLUMNS) * tick, dict(_processes(proc, tick)))


def cores_used_by_others(before: CpuTimes, now: CpuTimes, ours: int, seconds: float) -> float:
    """How many cores all but the process `ours` and its descendants kept busy."""
    family = _descendants(now, ours)
    own = sum(
        max(0.0, seconds_used - before.processes.get(pid, (0, 0.0))[1])
        for pid, (_, seconds_used) in now.processes.items()
        if pid in family
    )
    return max(0.0, now.busy - before.busy - own) / max(seconds, 1e-6)


class MachineUsage:
    """Remembers when the machine was last used by others."""

    def __init__(self, now: float, proc: Path = PROC) -> None:
        self._proc = proc
        self._last_used_monotonic = now  # a machine that has just started may be in use
        self._last_sample_monotonic = now
        self._last_cpu_times: CpuTimes | None = None

    async def seconds_since_use(self, now: float, unix: float) -> float:
        """Since the last use by others; `now` is monotonic. Look every few seconds: a look covers the time between."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            times = await asyncio.to_thread(cpu_times, self._proc)
            before, seconds = self._last_cpu_times, now - self._last_sample_monotonic
            if before is not None and cores_used_by_others(before, times, os.getpid(), seconds) > IN_USE_CORES:
                self._last_used_monotonic = now
            self._last_cpu_times, self._last_sample_monotonic = times, now
        idle_since = idle_since_of(await _loginctl())
        if idle_since is not None:
            self._last_used_monotonic = max(self._last_used_monotonic, now - max(0.0, unix - idle_since))
        return now - self._last_used_monotonic


def idle_since_of(answer: str) -> float | None:
    """The Unix time since when all of logind's sessions are idle: infinity when they are not, None when unknown."""
    words = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    if words.get("IdleHint") == "no":
        return float("inf")
    since = words.get("IdleSinceHint", "")
    return int(since) / 1e6 if words.get("IdleHint") == "yes" and since.isdecimal() else None


async def _loginctl() -> str:
    """What logind says about all sessions together; empty without one."""
    try:
        child = await asyncio.create_subprocess_exec(
            *("loginctl", "show-session", "-p", "IdleHint", "-p", "IdleSinceHint"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""
    try:
        async with asyncio.timeout(_LOGINCTL_TIMEOUT.total_seconds()):
            said, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        return ""
    return said.decode(errors="replace") if child.returncode == 0 else ""


def _processes(proc: Path, tick: float) -> Iterator[tuple[int, tuple[int, float]]]:
    for path in proc.iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(path.name), (int(fields[1]), (int(fields[11]) + int(fields[12])) * tick)


def _descendants(times: CpuTimes, root: int) -> set[int]:
    family, found = {root}, True
    while found:
        found = False
        for pid, (parent, _) in times.processes.items():
            if parent in family and pid not in family:
                family.add(pid)
                found = True
    return family


def _read_word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
