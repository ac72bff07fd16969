"""Use of the machine by battery, other programs and people, read from files as Linux writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.node.limits import machine_usage
from atoll.node.limits.machine_usage import MachineUsage, cores_used_by_others, cpu_times, idle_since_of, on_battery

TICK = os.sysconf("SC_CLK_TCK")


def supply(root: Path, name: str, **files: str) -> None:
    (root / name).mkdir(parents=True)
    for key, value in files.items():
        (root / name / key).write_text(value + "\n")


def test_a_machine_without_a_battery_runs_on_mains(tmp_path: Path) -> None:
    assert not on_battery(tmp_path / "absent")
    assert not on_battery(tmp_path)
    supply(tmp_path, "hidpp_battery_0", type="Battery", scope="Device", status="Discharging")  # a mouse
    assert not on_battery(tmp_path)


def test_a_laptop_runs_on_battery_only_while_it_is_unplugged(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert on_battery(tmp_path)
    supply(tmp_path, "AC", type="Mains", online="1")
    assert not on_battery(tmp_path)  # a battery that discharges although the plug is in: mains counts
    (tmp_path / "AC/online").write_text("0\n")
    assert on_battery(tmp_path)
    (tmp_path / "BAT0/status").write_text("Charging\n")
    assert not on_battery(tmp_path)


def stat(proc: Path, busy: int, **processes: tuple[int, int]) -> None:
    """/proc with the busy ticks of all cores and `p<pid>=(parent, ticks)`."""
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 999 999 0 0 0 0 0\ncpu0 …\n")
    for name, (parent, ticks) in processes.items():
        (proc / name[1:]).mkdir(exist_ok=True)
        (proc / name[1:] / "stat").write_text(f"{name[1:]} (a ) b) S {parent} 0 0 0 0 0 0 0 0 0 {ticks} 0 0 0 20\n")


def test_descendants_of_the_daemon_do_not_count_as_other_programs(tmp_path: Path) -> None:
    stat(tmp_path, 1000 * TICK, p10=(1, 5 * TICK), p11=(10, 0), p12=(11, 0), p20=(1, 0))
    before = cpu_times(tmp_path)
    stat(tmp_path, 1010 * TICK, p10=(1, 6 * TICK), p11=(10, 3 * TICK), p12=(11, 4 * TICK), p20=(1, 2 * TICK))
    now = cpu_times(tmp_path)
    assert cores_used_by_others(before, now, 10, seconds=10) == pytest.approx(0.2)
    assert cores_used_by_others(before, now, 12, seconds=10) == pytest.approx(0.6)


async def test_use_by_others_restarts_the_idle_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ""

    async def loginctl() -> str:
        return said

    monkeypatch.setattr(machine_usage, "_loginctl", loginctl)
    usage = MachineUsage(100.0, tmp_path)
    stat(tmp_path, 0)
    assert await usage.seconds_since_use(105.0, 1e9) == 5
    stat(tmp_path, 1 * TICK)  # 0.2 cores: nobody
    assert await usage.seconds_since_use(110.0, 1e9) == 10
    stat(tmp_path, 6 * TICK)  # a whole core
    assert await usage.seconds_since_use(115.0, 1e9) == 0
    assert await usage.seconds_since_use(120.0, 1e9) == 5
    said = "IdleHint=no\nIdleSinceHint=0\n"
    assert await usage.seconds_since_use(125.0, 1e9) == 0
    said = f"IdleHint=yes\nIdleSinceHint={int(1e9 + 3) * 10**6}\n"  # since 2 s ago
    assert await usage.seconds_since_use(130.0, 1e9 + 5) == 2
    (tmp_path / "stat").unlink()  # no Linux: only logind speaks
    assert await usage.seconds_since_use(140.0, 1e9 + 15) == 12


@pytest.mark.parametrize("answer", ["", "nonsense", "IdleHint=", "IdleHint=yes\nIdleSinceHint=soon"])
def test_unknown_answers_of_logind_do_not_count_as_use(answer: str) -> None:
    assert idle_since_of(answer) is None


def test_this_machine_can_be_observed() -> None:
    """Reads the kernel's own files: a busy child of this process is not another program."""
    burn = [sys.executable, "-c", "import os, time\nwhile time.process_time() < 0.6: pass\nprint(flush=True); input()"]
    with subprocess.Popen(burn, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        before = machine_usage.CpuTimes(0.0, {})
        child.stdout.readline()
        now = cpu_times()
        assert now.processes[child.pid] == (os.getpid(), pytest.approx(0.6, abs=0.2))
        family = cores_used_by_others(before, now, os.getpid(), 1.0)
        strangers = cores_used_by_others(before, now, 2**30, 1.0)
        assert strangers - family >= 0.5
        child.communicate(b"\n")
