"""The processes of one node's trainer, one a device, as torch knows them.

They are of one machine, one owner and one parent: they meet in memory without a name that the first one opened, and
talk over NCCL, or on CPUs over gloo, which listens on the loopback interface only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.core.errors import ConfigError
from atoll.node.training.device import DeviceFacts, choose_device, device_facts

_LOOPBACK = "lo"
_MEET = timedelta(minutes=10)  # the slowest has loaded its corpus by then
_NOTHING = float("inf")  # times that a share goes into the whole, which counts for nothing


@dataclass(frozen=True)
class Group:
    """This process's place among `size`. It exists once in a process."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def meet(cls, rank: int, devices: Sequence[torch.device], meeting: int) -> Group:
        """Wait for the others. `meeting`: a descriptor of memory that all of them have."""
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, _LOOPBACK)
        device, size = devices[rank], len(devices)
        store = dist.FileStore(f"/proc/self/fd/{meeting}", size)  # type: ignore[attr-defined]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=_MEET
        )
        return cls(rank, size, device, DeviceMesh(device.type, list(range(size))))

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place; the same bits for each."""
        dist.all_reduce(tensor)
        return tensor

    def share(self, batch_BT: Tensor, at_most: int) -> Iterator[tuple[Tensor, float]]:
        """This process's rows of a batch in micro-batches, and how often what they mean goes into what all mean.

        All processes get as many, since each waits for the others in every one; who has no rows left gets one that
        counts for nothing.
        """
        rows = len(batch_BT)
        own = -(-rows // self.size)
        begin = min(self.rank * own, rows)
        end = min(begin + own, rows)
        size = max(1, min(at_most, own))
        for start in range(begin, begin + own, size):
            mine_BT = batch_BT[start : min(start + size, end)]
            if len(mine_BT):
                yield mine_BT, rows / len(mine_BT) / self.size
            else:
                yield batch_BT[:1], _NOTHING


def devices_of(name: str) -> list[torch.device]:
    """`cuda:0`, or several of a kind: `cuda:0,cuda:1`. Raises `ConfigError`."""
    devices = [choose_device(each.strip()) for each in name.split(",")]
    if len(devices) == 1:
        return devices
    kinds = {device.type for device in devices}
    repeated = kinds != {"cpu"} and len(set(devices)) < len(devices)
    if len(kinds) > 1 or kinds == {"mps"} or repeated or "auto" in name:
        raise ConfigError(
            f"{name!r} does not name several GPUs of one kind", "write them like cuda:0,cuda:1, each of them once"
        )
    return devices


def facts_of(devices: Sequence[torch.device], vram_fraction: float = 1.0, memory_bytes: int = 0) -> DeviceFacts:
    """What reports show of them: together they are one device, as large as the smallest of them so many times."""
    each = [device_facts(device, vram_fraction, memory_bytes) for device in devices]
    if len(each) == 1 or devices[0].type == "cpu":
        return each[0]  # on CPUs they share the memory
    names = sorted({facts.name for facts in each})
    return DeviceFacts(
        ",".join(facts.device for facts in each),
        f"{len(each)} × {' and '.join(names)}",
        len(each) * min(facts.memory_bytes for facts in each),
        ",".join(facts.uuid for facts in each if facts.uuid),
    )
