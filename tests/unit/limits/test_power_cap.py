"""Power cap with a fake driver that behaves like NVIDIA's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.node.limits.power_cap import PowerCap, PowerCapRefused

UUID, OTHER = "GPU-1234", "GPU-5678"


class Driver(SimpleNamespace):
    """A driver of two GPUs with caps of 300 W and 250 W that accepts 100 to 350 W."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__(caps={UUID: 300_000, OTHER: 250_000}, permitted=True, opened=0)

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.caps:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetPowerManagementLimitConstraints(self, _: str) -> tuple[int, int]:
        return 100_000, 350_000

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:
        return int(self.caps[handle])

    def nvmlDeviceSetPowerManagementLimit(self, handle: str, milliwatts: int) -> None:
        if not self.permitted:
            raise self.NVMLError("Insufficient Permissions")
        self.caps[handle] = milliwatts


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    it = Driver()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", it)
    yield it
    assert it.opened == 0


def test_restore_sets_the_previous_cap(driver: Driver, tmp_path: Path) -> None:
    cap = PowerCap(tmp_path)
    cap.apply(200.0, [UUID])
    cap.apply(150.0, [UUID])
    assert driver.caps[UUID] == 150_000
    cap.restore()
    assert driver.caps[UUID] == 300_000
    cap.apply(200.0, [UUID])
    cap.apply(0.0, [UUID])
    assert driver.caps[UUID] == 300_000
    assert not list(tmp_path.iterdir())


def test_the_next_start_restores_the_cap_of_a_killed_daemon(driver: Driver, tmp_path: Path) -> None:
    PowerCap(tmp_path).apply(200.0, [UUID])
    PowerCap(tmp_path).restore()
    assert driver.caps[UUID] == 300_000


def test_each_gpu_is_capped_and_gets_its_own_previous_cap_back(driver: Driver, tmp_path: Path) -> None:
    PowerCap(tmp_path).apply(200.0, [UUID, OTHER])
    assert driver.caps == {UUID: 200_000, OTHER: 200_000}
    PowerCap(tmp_path).restore()
    assert driver.caps == {UUID: 300_000, OTHER: 250_000}


def test_a_refused_cap_names_the_reason_and_changes_nothing(driver: Driver, tmp_path: Path) -> None:
    cap = PowerCap(tmp_path)
    with pytest.raises(PowerCapRefused, match="100 to 350"):
        cap.apply(50.0, [UUID])
    with pytest.raises(PowerCapRefused, match="not an NVIDIA GPU"):
        cap.apply(200.0, [])
    driver.permitted = False
    with pytest.raises(PowerCapRefused, match="Insufficient Permissions"):
        cap.apply(200.0, [UUID])
    assert driver.caps[UUID] == 300_000
    driver.permitted = True
    cap.restore()
    assert driver.caps[UUID] == 300_000


def test_without_a_driver_the_cap_is_refused_and_the_file_kept(tmp_path: Path) -> None:
    """Uses the real library, on a machine without a GPU."""
    with pytest.raises(PowerCapRefused, match=r"driver refused the power cap|no GPU|Not Found"):
        PowerCap(tmp_path).apply(200.0, ["GPU-none"])
    (tmp_path / "power.json").write_text('{"version": 2, "milliwatts": {"GPU-none": 1}}')
    PowerCap(tmp_path).restore()  # warns, and tries again at the next start
    assert (tmp_path / "power.json").exists()
