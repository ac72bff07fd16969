"""The GPU's power cap, set through NVIDIA's management library (NVML).

The driver keeps a cap after the process ends. So `power.json` records the previous cap first, and exit restores it; if
the daemon is killed, its next start does. Most machines allow only root to set a cap. Without that right training
continues uncapped, and `atoll status` shows the reason.
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
    """The driver or this GPU refused the cap; training continues without it."""


class PowerCap:
    """Power caps of a node's GPUs. Every method blocks for milliseconds: call it in a thread."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / _FILE

    def apply(self, watts: float, uuids: Sequence[str]) -> None:
        """Set the cap of each GPU; 0 restores the previous caps. Raises `PowerCapRefused`, `DataDirUnusable`."""
        if not watts:
            self.restore()
            return
        if not uuids:
            raise PowerCapRefused("power_watts has no effect: the device is not an NVIDIA GPU")
        with _nvml() as nvml:
            handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
            for handle in handles.values():
                low, high = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                if not low <= watts * 1000 <= high:
                    bounds = f"{low / 1000:g} to {high / 1000:g} W"
                    raise PowerCapRefused(f"power_watts = {watts:g} was not set: this GPU accepts {bounds}")
            if not self._path.exists():
                before = {uuid: nvml.nvmlDeviceGetPowerManagementLimit(handle) for uuid, handle in handles.items()}
                write_atomic(self._path, json.dumps({"version": 2, "milliwatts": before}).encode())
            for handle in handles.values():
                nvml.nvmlDeviceSetPowerManagementLimit(handle, int(watts * 1000))
        _log.info("power cap set", watts=watts)

    def restore(self) -> None:
        """Restore the caps from before the first `apply` of this process, or of an earlier process that was killed."""
        try:
            written = json.loads(self._path.read_bytes())
            before = dict(written["milliwatts"])
            with _nvml() as nvml:
                for uuid, milliwatts in before.items():
                    nvml.nvmlDeviceSetPowerManagementLimit(nvml.nvmlDeviceGetHandleByUUID(uuid), int(milliwatts))
            self._path.unlink()
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, PowerCapRefused) as error:
            _log.warning("previous GPU power cap not restored; a reboot restores it", reason=str(error))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Open NVML; its errors become `PowerCapRefused`."""
    import pynvml  # here, so that the driver's library is loaded only if there is a cap

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise PowerCapRefused(f"the driver refused the power cap: {error}") from error
