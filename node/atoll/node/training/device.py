"""Devices: selection, memory, memory limits and precision. Only this module queries the hardware through torch.

ROCm builds of torch present their GPUs as CUDA devices and need no code of their own. A GPU without bf16 units computes
in fp16 with loss scaling. That is local to the node: vectors between nodes are fp32.
"""

from __future__ import annotations

import platform
import resource
import time
import weakref
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.clock import Clock
from atoll.core.errors import ConfigError, ModelTooLarge
from atoll.core.units import bytes_text
from atoll.node.system.host_memory import usable_host_memory

_PROCESS = Path("/proc/self/status")
_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about a device, for reports."""

    device: str
    name: str
    memory_bytes: int  # usable memory
    uuid: str = ""  # as in NVIDIA's tools; empty for others


def choose_device(name: str) -> torch.device:
    """Return this machine's device for `auto`, `cpu`, `cuda:0`, `mps`, …. Raises `ConfigError`."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is not a device", "use auto, cpu, cuda:0 or mps") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device {name} does not exist: torch sees {count} CUDA devices", "run `atoll doctor`")
        return torch.device("cuda", device.index or 0)
    if device.type not in ("cpu", "mps") or (device.type == "mps" and not torch.backends.mps.is_available()):
        raise ConfigError(f"device {name} cannot train on this machine", "use auto, cpu or cuda:0")
    return device


def device_facts(device: torch.device, vram_fraction: float = 1.0, memory_bytes: int = 0) -> DeviceFacts:
    """Return the name and the usable memory of a device.

    `vram_fraction`: usable share of a GPU's own memory. `memory_bytes`: usable host memory if the device is the CPU; 0
    means all.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory_bytes = int(properties.total_memory * vram_fraction)
        uuid = f"GPU-{properties.uuid}" if torch.version.cuda else ""
        return DeviceFacts(str(device), str(properties.name), memory_bytes, uuid)
    if device.type == "mps":
        return DeviceFacts("mps", "Apple GPU", int(torch.mps.recommended_max_memory() * vram_fraction))
    return DeviceFacts("cpu", _processor() or platform.machine(), usable_host_memory(memory_bytes))


def _processor() -> str:
    """Return the CPU's name; empty if the system does not report it."""
    try:
        lines = _PROCESSORS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def warm_up() -> None:
    """Start torch's threads with their buffers, and import the 60 MB of modules that its first optimiser needs.

    This happens before a memory limit is set, so that the limit does not count them.
    """
    many_MM = torch.ones(512, 512, requires_grad=True)
    torch.mm(many_MM, many_MM).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW([many_MM]).step()


def limit_host_memory(memory_bytes: int) -> None:
    """Limit (on Linux) how many more bytes this process may allocate. A larger allocation fails."""
    if not _PROCESS.exists():
        return
    lines = dict(line.split(":", 1) for line in _PROCESS.read_text().splitlines())
    allocated = 1024 * int(lines["VmData"].split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (allocated + memory_bytes, hard))


def limit_device_memory(device: torch.device, facts: DeviceFacts, vram_fraction: float) -> None:
    """Select the device for torch and limit its memory to a share. Raises `ModelTooLarge` if more is already in use.

    torch's allocator enforces the limit: an allocation beyond it fails as if the device were that small. The CUDA
    context, some hundred MB, is not counted. There is no effect on a CPU. `facts` are used in the error.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise a process for another GPU also takes some hundred MB of the first GPU
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved(device)
        if held > torch.cuda.get_device_properties(device).total_memory * vram_fraction:
            raise model_too_large(f"already holds {bytes_text(held)}", facts)
        torch.cuda.set_per_process_memory_fraction(vram_fraction, device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(vram_fraction)


def check_fits(needed_bytes: int, facts: DeviceFacts, what: str = "") -> None:
    """Raise `ModelTooLarge` if the model needs more memory than the device has, before anything is allocated."""
    if needed_bytes > facts.memory_bytes:
        raise model_too_large(f"needs about {bytes_text(needed_bytes)}{what}", facts)


def model_too_large(what: str, facts: DeviceFacts) -> ModelTooLarge:
    """Make the error for a model that does not fit, by estimate or by a failed allocation."""
    return ModelTooLarge(
        f"the model is too large for {facts.name} ({facts.device}, {bytes_text(facts.memory_bytes)}): it {what}",
        "lower micro_batch_samples, set activation_checkpointing, choose a smaller preset, or use a larger device",
    )


def working_precision(precision: str, device: torch.device) -> str:
    """Return `fp32`, `bf16` or `fp16`: the spec's precision, or fp16 on a GPU without bf16 units."""
    return "fp16" if precision == "bf16" and device.type == "cuda" and not has_bf16_units(device) else precision


def has_bf16_units(device: torch.device) -> bool:
    """True for a GPU that multiplies bf16 at least as fast as fp32. False for CPUs, because most have no bf16 units."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Multiply matrices in a working precision inside a `with` block; everything else stays fp32."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def compute_clock_seconds(device: torch.device, clock: Clock) -> float:
    """Read a clock that runs while the caller computes.

    On a CPU it is the thread's CPU time, which excludes time in which the thread has no core.
    """
    return time.thread_time() if device.type == "cpu" else clock.monotonic()


def lock_host_pages(vector: Tensor, device: torch.device) -> bool:
    """Lock a host vector's pages for a GPU, which copies to and from locked pages several times as fast.

    Returns whether they are locked; they stay so as long as `vector` itself exists. A refusal by the system is no
    error.
    """
    if device.type != "cuda" or not vector.numel():
        return False
    runtime, address = torch.cuda.cudart(), vector.data_ptr()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, vector.nbytes, 0)) == 0:
        weakref.finalize(vector, runtime.cudaHostUnregister, address).atexit = False
        return True
    with suppress(RuntimeError):  # the next call of CUDA reports and clears the error
        torch.zeros(1, device=device).add_(1)
    return False


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
