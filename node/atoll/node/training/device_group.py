"""The processes of one node's trainer, one a device, as torch knows them.

They are of one machine, one owner and one parent: they meet in memory without a name that the first one opened, and
talk over NCCL, or on CPUs over gloo, which listens on the loopback interface only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.node.training.device import DeviceFacts, choose_device, device_facts
from atoll.node.training.device_names import parse_device_names

_INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}  # whatever the machine's owner set them to
_RENDEZVOUS_TIMEOUT = timedelta(minutes=8)  # the slowest has loaded its corpus by then, and the daemon still waits
ZERO_WEIGHT_DIVISOR = math.inf  # times that what counts for nothing goes into a whole


SendToRanks = Callable[[Any], object]


def no_other_ranks(_: Any) -> None:
    """There are no others, or they are told by another process."""


@dataclass(frozen=True)
class Rendezvous:
    """What it takes to meet."""

    devices: Sequence[torch.device]
    rank: int
    rendezvous_fd: int  # memory that all of them have
    send_to_ranks: SendToRanks = no_other_ranks


@dataclass(frozen=True)
class DeviceGroup:
    """This process's place among `size`. It exists once in a process."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    send_to_ranks: SendToRanks  # what the others are to do now; on those, nothing

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> DeviceGroup:
        """Wait for the others."""
        os.environ.update(_INTERFACE)
        rank, size, device = rendezvous.rank, len(rendezvous.devices), rendezvous.devices[rendezvous.rank]
        store = dist.FileStore(f"/proc/self/fd/{rendezvous.rendezvous_fd}", size)  # type: ignore[attr-defined]
        store.set_timeout(_RENDEZVOUS_TIMEOUT)  # else it has its own, and nobody waits for longer
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=_RENDEZVOUS_TIMEOUT,
        )
        return cls(rank, size, device, DeviceMesh(device.type, list(range(size))), rendezvous.send_to_ranks)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place; the same bits for each."""
        dist.all_reduce(tensor)
        return tensor

    def matches_rank_zero(self, digest: str) -> bool:
        """Whether the first process has the same."""
        own = torch.frombuffer(bytearray(bytes.fromhex(digest)), dtype=torch.uint8).to(self.device)
        return torch.equal(self.broadcast(own.clone()), own)

    def own(self, rows: int) -> slice:
        """Which rows of a batch are this process's; of the last ones it may be fewer than of others, or none."""
        most = -(-rows // self.size)
        return slice(min(self.rank * most, rows), min((self.rank + 1) * most, rows))

    def rank_micro_batches(self, batch_BT: Tensor, at_most: int) -> Iterator[tuple[Tensor, float]]:
        """This process's rows in micro-batches, and how often each, at its mean, goes into the mean of all rows.

        All processes get as many, since each waits for the others in every one; who has no rows left gets one that
        counts for nothing. `at_most` are those of all processes at once, or one each.
        """
        rows, own = len(batch_BT), self.own(len(batch_BT))
        most = -(-rows // self.size)
        size = max(1, min(-(-at_most // self.size), most))
        for start in range(own.start, own.start + most, size):
            mine_BT = batch_BT[start : min(start + size, own.stop)]
            yield (mine_BT, rows / len(mine_BT)) if len(mine_BT) else (batch_BT[:1], ZERO_WEIGHT_DIVISOR)

    def scatter(self, rows: int, shape: Sequence[int], dtype: torch.dtype, whole: Tensor | None) -> Tensor:
        """This process's rows of what the first one has, or where it has none, one row of zeros.

        `shape` is a row's. `whole` is None on the others.
        """
        most, own = -(-rows // self.size), self.own(rows)
        mine = torch.zeros(most, *shape, dtype=dtype, device=self.device)
        pieces = None
        if whole is not None:
            padded = torch.zeros(self.size * most, *shape, dtype=dtype, device=self.device)
            padded[:rows].copy_(whole)
            pieces = list(torch.split(padded, most))
        dist.scatter(mine, pieces, src=0)
        return mine[: max(1, own.stop - own.start)]

    def gather(self, rows: int, mine: Tensor) -> Tensor:
        """The inverse: all rows, on the first process; elsewhere nothing of use."""
        most, own = -(-rows // self.size), self.own(rows)
        padded = torch.zeros(most, *mine.shape[1:], dtype=mine.dtype, device=self.device)
        padded[: own.stop - own.start].copy_(mine[: own.stop - own.start])
        pieces = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, pieces, dst=0)
        return torch.cat(pieces)[:rows] if pieces is not None else mine

    def broadcast(self, tensor: Tensor) -> Tensor:
        """What the first process has, in place."""
        dist.broadcast(tensor, src=0)
        return tensor


def choose_devices(name: str) -> list[torch.device]:
    """`cuda:0`, or several of a kind: `cuda:0,cuda:1`. Raises `ConfigError`."""
    return [choose_device(each) for each in parse_device_names(name)]


def combined_facts(devices: Sequence[torch.device], vram_fraction: float = 1.0, memory_bytes: int = 0) -> DeviceFacts:
    """What reports show of them: together they are one device, as large as the smallest of them so many times."""
    each = [device_facts(device, vram_fraction, memory_bytes) for device in devices]
    if len(each) == 1:
        return each[0]
    names = sorted({facts.name for facts in each})
    memories = 1 if devices[0].type == "cpu" else len(each)  # on CPUs they share it
    return DeviceFacts(
        ",".join(facts.device for facts in each),
        f"{len(each)} × {' and '.join(names)}",
        memories * min(facts.memory_bytes for facts in each),
        ",".join(facts.uuid for facts in each if facts.uuid),
    )
