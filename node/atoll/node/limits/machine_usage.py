"""Observation of the machine: whether it runs on battery, and when its owner last used it.

The machine is in use if one of two signals says so:

- Other programs use the CPU: /proc/stat minus the daemon and its descendants exceeds `IN_USE_CORES`.
- Somebody is logged in and active: logind's IdleHint, which desktops and terminals keep, read with `loginctl`.

A signal that the machine does not have never pauses training.
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
IN_USE_CORES = 0.5  # CPU seconds a second: above an idle desktop, below any program that computes
_LOGINCTL_TIMEOUT = timedelta(seconds=3)
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal


def on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """Return whether the machine runs on its own battery or UPS; a mouse's battery does not count."""
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
    """CPU seconds since boot: of the whole machine, and of each process."""

    busy: float
    processes: dict[int, tuple[int, float]]  # pid → parent's pid, user and system seconds


def cpu_times(proc: Path = PROC) -> CpuTimes:
    """Read the CPU times from `proc`. Raises `OSError` or `ValueError` if the kernel is not Linux."""
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    columns = (proc / "stat").read_text().splitlines()[0].split()[1:]
    return CpuTimes(sum(int(columns[i]) for i in _BUSY_COLUMNS) * tick, dict(_processes(proc, tick)))


def cores_used_by_others(before: CpuTimes, now: CpuTimes, ours: int, seconds: float) -> float:
    """Cores kept busy by all processes except `ours` and its descendants."""
    family = _descendants(now, ours)
    own = sum(
        max(0.0, seconds_used - before.processes.get(pid, (0, 0.0))[1])
        for pid, (_, seconds_used) in now.processes.items()
        if pid in family
    )
    return max(0.0, now.busy - before.busy - own) / max(seconds, 1e-6)


class MachineUsage:
    """Tracks when something other than this daemon last used the machine."""

    def __init__(self, now: float, proc: Path = PROC) -> None:
        self._proc = proc
        self._last_used_monotonic = now  # unknown at the start: assume that the machine is in use
        self._last_sample_monotonic = now
        self._last_cpu_times: CpuTimes | None = None

    async def seconds_since_use(self, now: float, unix: float) -> float:
        """Seconds since the last use by others. `now` is monotonic, `unix` the wall clock.

        Call it every few seconds: each call measures the CPU use since the previous one.
        """
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
    """Unix time since which all logind sessions are idle; infinity if one is active, None if unknown."""
    words = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    if words.get("IdleHint") == "no":
        return float("inf")
    since = words.get("IdleSinceHint", "")
    return int(since) / 1e6 if words.get("IdleHint") == "yes" and since.isdecimal() else None


async def _loginctl() -> str:
    """Output of `loginctl show-session` over all sessions; empty if it is absent, fails or times out."""
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
            output, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        return ""
    return output.decode(errors="replace") if child.returncode == 0 else ""


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
