"""Which device, at which precision, and whether the model fits. The only file that asks torch what a machine has.

ROCm builds of torch present themselves as CUDA and need nothing of their own. A device that cannot compute in
bf16 does so in fp16 with loss scaling: a matter of the node, invisible to the others, whose vectors are fp32.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.core.clock import Clock
from atoll.core.errors import ConfigError, ModelTooLarge
from atoll.core.units import bytes_text

HOST_OVERHEAD_BYTES = (
    32 << 20
)  # of a limit on host memory: stacks of threads, what waits in queues, what allocators keep
_PROCESS = Path("/proc/self/status")
_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class DeviceFacts:
    """A device as reports show it."""

    device: str
    name: str
    memory_bytes: int  # what may be used of it
    uuid: str = ""  # as NVIDIA's tools know it


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda:0`, `mps`, … → a device that is there. Raises `ConfigError`."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is not a device", "write auto, cpu, cuda:0 or mps") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device {name} is not here: torch sees {count} CUDA devices", "run `atoll doctor`")
        return torch.device("cuda", device.index or 0)
    if device.type not in ("cpu", "mps") or (device.type == "mps" and not torch.backends.mps.is_available()):
        raise ConfigError(f"device {name} cannot train on this machine", "write auto, cpu or cuda:0")
    return device


def device_facts(device: torch.device, vram_fraction: float = 1.0, memory_bytes: int = 0) -> DeviceFacts:
    """Name and memory of a device, of which `vram_fraction` may be used where it is memory of its own.

    `memory_bytes` may be used where it is the host's; 0: all of it.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory_bytes = int(properties.total_memory * vram_fraction)
        uuid = f"GPU-{properties.uuid}" if torch.version.cuda else ""
        return DeviceFacts(str(device), str(properties.name), memory_bytes, uuid)
    if device.type == "mps":
        return DeviceFacts("mps", "Apple GPU", int(torch.mps.recommended_max_memory() * vram_fraction))
    most = _host_memory_bytes()
    usable = min(most, max(0, memory_bytes - HOST_OVERHEAD_BYTES)) if memory_bytes else most
    return DeviceFacts("cpu", _processor() or platform.machine(), usable)


def _processor() -> str:
    """The CPU's name, where the system tells one."""
    try:
        lines = _PROCESSORS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_host_memory(memory_bytes: int) -> None:
    """From now on this process may allocate so many bytes more (Linux). What goes beyond fails."""
    if not _PROCESS.exists():
        return
    lines = dict(line.split(":", 1) for line in _PROCESS.read_text().splitlines())
    allocated = 1024 * int(lines["VmData"].split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (allocated + memory_bytes, hard))


def limit_device_memory(device: torch.device, facts: DeviceFacts, vram_fraction: float) -> None:
    """Have torch use the device, and no more than that share of it. Raises `ModelTooLarge` if it holds more already.

    `facts` are for the error.

    The allocator enforces it: what goes beyond fails as if the device were that small. The CUDA context itself, some
    hundred MB, is not counted. On a CPU it does nothing.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else a process for another GPU takes some hundred MB of the first one, too
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved(device)
        if held > torch.cuda.get_device_properties(device).total_memory * vram_fraction:
            raise model_too_large(f"holds {bytes_text(held)} already", facts)
        torch.cuda.set_per_process_memory_fraction(vram_fraction, device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(vram_fraction)


def check_fits(needed_bytes: int, facts: DeviceFacts, what: str = "") -> None:
    """Raises `ModelTooLarge` before anything is allocated."""
    if needed_bytes > facts.memory_bytes:
        raise model_too_large(f"needs about {bytes_text(needed_bytes)}{what}", facts)


def model_too_large(what: str, facts: DeviceFacts) -> ModelTooLarge:
    """The error for a model that does not fit, found by arithmetic or by an allocation that failed."""
    return ModelTooLarge(
        f"the model is too large for {facts.name} ({facts.device}, {bytes_text(facts.memory_bytes)}): it {what}",
        "lower micro_batch_samples, set activation_checkpointing, choose a smaller preset, or use a larger device",
    )


def working_precision(precision: str, device: torch.device) -> str:
    """`fp32`, `bf16` or `fp16`: the spec's, or fp16 where a GPU has no bf16 units."""
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp16"
    return precision


def compute_clock_seconds(device: torch.device, clock: Clock) -> float:
    """A reading that goes on while the caller computes: on a CPU, while its thread has a core."""
    return time.thread_time() if device.type == "cpu" else clock.monotonic()


def synchronize(device: torch.device) -> None:
    """Wait until everything that was asked of the device is computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
