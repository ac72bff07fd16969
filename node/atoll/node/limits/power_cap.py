"""The GPU's power cap, through NVIDIA's management library where the driver lets us.

The cap belongs to the driver and outlives every process, so what was there before is written down first and put back on
exit, or by the next start if this one is killed. Setting it takes root on most machines; without, training goes on
and the owner is told why there is no cap.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll.core import log
from atoll.core.errors import AtollError
from atoll.core.files import write_atomic

_FILE = "power.json"

_log = log.get("power")


class PowerCapRefused(AtollError):
    """The driver, or this GPU, takes no such cap; training goes on without."""


class PowerCap:
    """The caps of a node's GPUs. Every method takes milliseconds and may block: call it in a thread."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / _FILE

    def apply(self, watts: float, uuids: Sequence[str]) -> None:
        """Set the cap of each; 0 puts back what was there before. Raises `PowerCapRefused`, `DataDirUnusable`."""
        if not watts:
            self.restore()
            return
        if not uuids:
            raise PowerCapRefused("power_watts does nothing here: the device is not an NVIDIA GPU")
        with _nvml() as nvml:
            handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
            for handle in handles.values():
                low, high = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                if not low <= watts * 1000 <= high:
                    raise PowerCapRefused(f"power_watts = {watts:g}: this GPU takes {low / 1000:g} to {high / 1000:g}")
            if not self._path.exists():
                before = {uuid: nvml.nvmlDeviceGetPowerManagementLimit(handle) for uuid, handle in handles.items()}
                write_atomic(self._path, json.dumps({"version": 2, "milliwatts": before}).encode())
            for handle in handles.values():
                nvml.nvmlDeviceSetPowerManagementLimit(handle, int(watts * 1000))
        _log.info("power cap set", watts=watts)

    def restore(self) -> None:
        """Put back what was there before the first `apply`, of this process or one that was killed."""
        try:
            written = json.loads(self._path.read_bytes())
            first = "uuid" in written  # as versions before the second have it
            before = {written["uuid"]: written["milliwatts"]} if first else dict(written["milliwatts"])
            with _nvml() as nvml:
                for uuid, milliwatts in before.items():
                    nvml.nvmlDeviceSetPowerManagementLimit(nvml.nvmlDeviceGetHandleByUUID(uuid), int(milliwatts))
            self._path.unlink()
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, PowerCapRefused) as error:
            _log.warning("the GPU's power cap was not put back; a reboot does it", reason=str(error))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVIDIA's library, open. Its errors become `PowerCapRefused`."""
    import pynvml  # here: the driver's library is loaded only by who wants a cap

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise PowerCapRefused(f"the driver sets no power cap: {error}") from error
