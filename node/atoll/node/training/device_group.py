"""Process group of one node's trainer: one process per device, connected by `torch.distributed`.

All processes run on one machine for one owner under one parent. They connect through an unnamed memory file that the
first process opened. They communicate over NCCL, or on CPUs over gloo, which listens on the loopback interface only.
`fsdp_model.py` shards a model over the group.
"""

from __future__ import annotations

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
from atoll.node.training.targets import ZERO_WEIGHT_DIVISOR, count_targets, divisor

_INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}  # overrides the settings of the machine's owner
_RENDEZVOUS_TIMEOUT = timedelta(minutes=8)  # long enough to load a corpus, shorter than the daemon's own timeout

SendToRanks = Callable[[Any], object]


def no_other_ranks(_: Any) -> None:
    """Do nothing: there are no other ranks, or another process sends to them."""


@dataclass(frozen=True)
class Rendezvous:
    """The data that a process needs to connect to the group."""

    devices: Sequence[torch.device]
    rank: int
    rendezvous_fd: int  # descriptor of the memory file that all processes share
    send_to_ranks: SendToRanks = no_other_ranks


@dataclass(frozen=True)
class DeviceGroup:
    """This process's rank among `size` processes. A process has at most one group."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    send_to_ranks: SendToRanks  # sends the other ranks their next operation; does nothing on other ranks

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> DeviceGroup:
        """Wait until all processes are connected."""
        os.environ.update(_INTERFACE)
        rank, size, device = rendezvous.rank, len(rendezvous.devices), rendezvous.devices[rendezvous.rank]
        store = dist.FileStore(f"/proc/self/fd/{rendezvous.rendezvous_fd}", size)  # type: ignore[attr-defined]
        store.set_timeout(_RENDEZVOUS_TIMEOUT)  # otherwise the store's own, shorter timeout applies
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=_RENDEZVOUS_TIMEOUT,
        )
        return cls(rank, size, device, DeviceMesh(device.type, list(range(size))), rendezvous.send_to_ranks)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place; all processes get the same bits."""
        dist.all_reduce(tensor)
        return tensor

    def matches_rank_zero(self, digest: str) -> bool:
        """Return whether rank 0 has the same digest."""
        own = torch.frombuffer(bytearray(bytes.fromhex(digest)), dtype=torch.uint8).to(self.device)
        return torch.equal(self.broadcast(own.clone()), own)

    def own_rows(self, rows: int) -> slice:
        """Return the rows of a batch that belong to this process; the last processes may have fewer or none."""
        return self.rows_by_rank(rows)[self.rank]

    def rows_by_rank(self, rows: int) -> list[slice]:
        """Return the rows of a batch that belong to each process."""
        most = -(-rows // self.size)
        return [slice(min(rank * most, rows), min((rank + 1) * most, rows)) for rank in range(self.size)]

    def rank_micro_batches(self, batch_BT: Tensor, at_most: int) -> Iterator[tuple[Tensor, float]]:
        """Yield this process's rows in micro-batches, each with its divisor.

        A micro-batch's mean loss divided by its divisor is its part of the mean over all targets. All processes get the
        same number of micro-batches, because each waits for the others in every one. A process without rows left gets a
        micro-batch with no weight. `at_most`: rows of all processes in one micro-batch; each process gets at least one
        row.
        """
        rows, own, targets = len(batch_BT), self.own_rows(len(batch_BT)), count_targets(batch_BT)
        most = -(-rows // self.size)
        size = max(1, min(-(-at_most // self.size), most))
        for start in range(own.start, own.start + most, size):
            mine_BT = batch_BT[start : min(start + size, own.stop)]
            if len(mine_BT):
                yield mine_BT, divisor(targets, count_targets(mine_BT))
            else:
                yield batch_BT[:1], ZERO_WEIGHT_DIVISOR

    def scatter(self, rows: int, shape: Sequence[int], dtype: torch.dtype, whole: Tensor | None) -> Tensor:
        """Distribute `whole` from rank 0, and return this process's rows; one row of zeros if it has none.

        `shape` is that of a row. `whole` is None on the other ranks.
        """
        most, own = -(-rows // self.size), self.own_rows(rows)
        mine = torch.zeros(most, *shape, dtype=dtype, device=self.device)
        pieces = None
        if whole is not None:
            padded = torch.zeros(self.size * most, *shape, dtype=dtype, device=self.device)
            padded[:rows].copy_(whole)
            pieces = list(torch.split(padded, most))
        dist.scatter(mine, pieces, src=0)
        return mine[: max(1, own.stop - own.start)]

    def gather(self, rows: int, mine: Tensor) -> Tensor:
        """Collect all rows on rank 0, as the inverse of `scatter`; the result of other ranks is meaningless."""
        most, own = -(-rows // self.size), self.own_rows(rows)
        padded = torch.zeros(most, *mine.shape[1:], dtype=mine.dtype, device=self.device)
        padded[: own.stop - own.start].copy_(mine[: own.stop - own.start])
        pieces = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, pieces, dst=0)
        return torch.cat(pieces)[:rows] if pieces is not None else mine

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's tensor to all processes, in place."""
        dist.broadcast(tensor, src=0)
        return tensor


def choose_devices(name: str) -> list[torch.device]:
    """Return the devices that `cuda:0`, or several like `cuda:0,cuda:1`, names. Raises `ConfigError`."""
    return [choose_device(each) for each in parse_device_names(name)]


def combined_facts(devices: Sequence[torch.device], vram_fraction: float = 1.0, memory_bytes: int = 0) -> DeviceFacts:
    """Combine the facts of several devices into those of one device, for reports.

    Its memory is that of the smallest device times the number of devices.
    """
    each = [device_facts(device, vram_fraction, memory_bytes) for device in devices]
    if len(each) == 1:
        return each[0]
    names = sorted({facts.name for facts in each})
    memories = 1 if devices[0].type == "cpu" else len(each)  # CPU processes share one memory
    return DeviceFacts(
        ",".join(facts.device for facts in each),
        f"{len(each)} × {' and '.join(names)}",
        memories * min(facts.memory_bytes for facts in each),
        ",".join(facts.uuid for facts in each if facts.uuid),
    )
