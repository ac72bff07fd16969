"""Weights that one process holds: the whole flat vector, or the shards on its device.

Outer rounds work on the whole vector in layer order: the anchor and the pseudo-gradient are in memory that all
processes of a node share. `Weights` maps parts of that vector to the elements on this device, and reads and changes
these elements wherever they are. `training/replica.py` and the stages of pipelines use it.

Shape suffixes: E all elements, P elements on this device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from atoll.node.model.flat_layout import FlatLayout

ALL = slice(0, None)


class Weights(Protocol):
    """fp32 weights on one device. A `part` is a slice of all elements."""

    @property
    def device(self) -> torch.device: ...

    @property
    def elements(self) -> int:
        """P: number of elements on this device."""
        ...

    def local_slice(self, part: slice) -> slice:
        """Return the slice of this device's elements that belong to a part."""
        ...

    def local_values(self, vector_E: Tensor, part: slice = ALL) -> Tensor:
        """Return this device's elements of a part of any vector: [P of the part], on the vector's device."""
        ...

    def write_to(self, values_P: Tensor, vector_E: Tensor, part: slice = ALL) -> None:
        """Write local values to their positions in a vector; its other elements do not change."""
        ...

    def read(self, part: slice = ALL) -> Tensor:
        """Copy the weights [P of the part]."""
        ...

    def modify(self, part: slice = ALL) -> AbstractContextManager[Tensor]:
        """Yield the weights [P of the part], to be changed in place."""
        ...

    def fill(self, vector_E: Tensor) -> None:
        """Set the weights to the values of a vector, without a temporary copy."""
        ...

    def restore(self, values_P: Tensor) -> None:
        """Set the weights to values that `read` returned."""
        ...


class WholeWeights:
    """All weights, as one vector."""

    def __init__(self, weights_E: Tensor) -> None:
        self._weights_E = weights_E

    @property
    def device(self) -> torch.device:
        return self._weights_E.device

    @property
    def elements(self) -> int:
        return self._weights_E.numel()

    def local_slice(self, part: slice) -> slice:
        return part

    def local_values(self, vector_E: Tensor, part: slice = ALL) -> Tensor:
        return vector_E[part]

    def write_to(self, values_P: Tensor, vector_E: Tensor, part: slice = ALL) -> None:
        vector_E[part].copy_(values_P)

    def read(self, part: slice = ALL) -> Tensor:
        return self._weights_E[part].clone()

    @contextmanager
    def modify(self, part: slice = ALL) -> Iterator[Tensor]:
        yield self._weights_E[part]

    def fill(self, vector_E: Tensor) -> None:
        self._weights_E.copy_(vector_E)

    restore = fill


@dataclass(frozen=True)
class ShardSlices:
    """Slices of the flat vector on one of several devices, if each parameter is split along its first dimension.

    The split is that of `torch.chunk`, and so of FSDP2: runs of rows of equal length, of which the last may be shorter
    or empty. Rows are contiguous, so a device has one slice of each parameter.
    """

    slices: tuple[slice, ...]  # slices of all elements, one per parameter, in order

    @classmethod
    def of(cls, layout: FlatLayout, rank: int, size: int) -> ShardSlices:
        """Compute the slices of device `rank` of `size`."""
        slices = []
        for slot in layout.slots:
            rows = slot.shape[0]
            run, row = -(-rows // size), slot.elements // rows
            first, last = min(rank * run, rows), min((rank + 1) * run, rows)
            slices.append(slice(slot.offset + first * row, slot.offset + last * row))
        return cls(tuple(slices))

    @classmethod
    def largest_share_ratio(cls, layout: FlatLayout, size: int) -> float:
        """Return the size of the largest device's shard, as a multiple of an equal share among `size` devices.

        The largest is the first: no device has longer runs.
        """
        return size * cls.of(layout, 0, size).offsets[-1] / layout.elements

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the slices among the elements on this device, then their total."""
        return tuple(accumulate((shard.stop - shard.start for shard in self.slices), initial=0))

    def within(self, part: slice) -> list[slice]:
        """Intersect all slices with a part: one slice of all elements per parameter, many of them empty."""
        first, last = part.start or 0, part.stop
        found = []
        for shard in self.slices:
            start = max(shard.start, first)
            found.append(slice(start, max(start, shard.stop if last is None else min(shard.stop, last))))
        return found


class ShardedWeights:
    """The weights on one of several devices: a shard of every parameter, each in its own memory."""

    def __init__(self, shards: ShardSlices, memory: Sequence[Tensor], device: torch.device) -> None:
        """`memory`: this device's shard of each parameter, contiguous."""
        self._shards, self._device = shards, device
        self._memory = [each.view(-1) for each in memory]

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def elements(self) -> int:
        return self._shards.offsets[-1]

    def local_slice(self, part: slice) -> slice:
        before = self._count(slice(0, part.start or 0))
        return slice(before, before + self._count(part))

    def local_values(self, vector_E: Tensor, part: slice = ALL) -> Tensor:
        return torch.cat([vector_E[:0], *(vector_E[shard] for shard in self._shards.within(part))])

    def write_to(self, values_P: Tensor, vector_E: Tensor, part: slice = ALL) -> None:
        offset = 0
        for shard in self._shards.within(part):
            vector_E[shard].copy_(values_P[offset : offset + _length(shard)])
            offset += _length(shard)

    def read(self, part: slice = ALL) -> Tensor:
        nothing = torch.empty(0, device=self._device)  # the result for a span whose layers are all frozen
        return torch.cat([nothing, *(memory[local] for memory, local in self._local_parts(part))])

    @contextmanager
    def modify(self, part: slice = ALL) -> Iterator[Tensor]:
        values_P = self.read(part)
        yield values_P
        self._write(values_P, part)

    def fill(self, vector_E: Tensor) -> None:
        for memory, shard in zip(self._memory, self._shards.slices, strict=True):
            memory.copy_(vector_E[shard])

    def restore(self, values_P: Tensor) -> None:
        self._write(values_P, ALL)

    def _write(self, values_P: Tensor, part: slice) -> None:
        offset = 0
        for memory, local in self._local_parts(part):
            memory[local].copy_(values_P[offset : offset + _length(local)])
            offset += _length(local)

    def _count(self, part: slice) -> int:
        return sum(map(_length, self._shards.within(part)))

    def _local_parts(self, part: slice) -> Iterator[tuple[Tensor, slice]]:
        """Yield each parameter's memory and the slice of it that belongs to the part."""
        for memory, whole, shard in zip(self._memory, self._shards.slices, self._shards.within(part), strict=True):
            yield memory, slice(shard.start - whole.start, shard.stop - whole.start)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
