"""What one process holds of a model's weights: all elements of a flat vector, or those on its device of several.

Outer rounds know the whole vector, in layer order: anchor and pseudo-gradient stand in memory that all processes of a
node see. `Weights` says which elements of it are here, and reads and changes the weights themselves, wherever they lie.

Shape suffixes: E all elements, P those that are here.
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
    """fp32, on one device. A `part` is a slice of all elements."""

    @property
    def device(self) -> torch.device: ...

    @property
    def elements(self) -> int:
        """P: how many are here."""
        ...

    def local_slice(self, part: slice) -> slice:
        """Which of those that are here belong to a part."""
        ...

    def local_values(self, vector_E: Tensor, part: slice = ALL) -> Tensor:
        """A part of any vector, as far as it is of elements that are here: [P of the part], on any device."""
        ...

    def write_to(self, values_P: Tensor, vector_E: Tensor, part: slice = ALL) -> None:
        """The inverse: write them to their places in a vector; others are left alone."""
        ...

    def read(self, part: slice = ALL) -> Tensor:
        """A copy of the weights [P of the part]."""
        ...

    def modify(self, part: slice = ALL) -> AbstractContextManager[Tensor]:
        """The weights [P of the part], to be changed in place."""
        ...

    def fill(self, vector_E: Tensor) -> None:
        """Make them those of a vector, without a copy of them in between."""
        ...

    def restore(self, values_P: Tensor) -> None:
        """Make them what `read` gave."""
        ...


class WholeWeights:
    """All of them, as one vector."""

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
    """Which elements lie on one of several devices, when each parameter is cut along its first dimension.

    As `torch.chunk` cuts, and with it FSDP2: runs of rows of one length, of which the last may be shorter or empty.
    Rows are contiguous, so that a device has one slice of each parameter.
    """

    slices: tuple[slice, ...]  # of all elements, one a parameter, in their order

    @classmethod
    def of(cls, layout: FlatLayout, rank: int, size: int) -> ShardSlices:
        """Those of device `rank` of `size`."""
        slices = []
        for slot in layout.slots:
            rows = slot.shape[0]
            run, row = -(-rows // size), slot.elements // rows
            first, last = min(rank * run, rows), min((rank + 1) * run, rows)
            slices.append(slice(slot.offset + first * row, slot.offset + last * row))
        return cls(tuple(slices))

    @classmethod
    def largest_share_ratio(cls, layout: FlatLayout, size: int) -> float:
        """How many times its share, at most, one of `size` devices has: the first, which has the longest runs."""
        return size * cls.of(layout, 0, size).offsets[-1] / layout.elements

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each begins among those that are here; one more than there are pieces."""
        return tuple(accumulate((it.stop - it.start for it in self.slices), initial=0))

    def within(self, part: slice) -> list[slice]:
        """Of a part of all elements, what is here: one slice of all elements a parameter, many of them empty."""
        first, last = part.start or 0, part.stop
        found = []
        for it in self.slices:
            start = max(it.start, first)
            found.append(slice(start, max(start, it.stop if last is None else min(it.stop, last))))
        return found


class ShardedWeights:
    """Those of one device: the pieces of all parameters, each in memory of its own."""

    def __init__(self, pieces: ShardSlices, memory: Sequence[Tensor], device: torch.device) -> None:
        """`memory`: by parameter, the piece of it that is here, contiguous."""
        self._pieces, self._device = pieces, device
        self._memory = [each.view(-1) for each in memory]

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def elements(self) -> int:
        return self._pieces.offsets[-1]

    def local_slice(self, part: slice) -> slice:
        before = self._count(slice(0, part.start or 0))
        return slice(before, before + self._count(part))

    def local_values(self, vector_E: Tensor, part: slice = ALL) -> Tensor:
        return torch.cat([vector_E[:0], *(vector_E[it] for it in self._pieces.within(part))])

    def write_to(self, values_P: Tensor, vector_E: Tensor, part: slice = ALL) -> None:
        offset = 0
        for place in self._pieces.within(part):
            vector_E[place].copy_(values_P[offset : offset + _length(place)])
            offset += _length(place)

    def read(self, part: slice = ALL) -> Tensor:
        nothing = torch.empty(0, device=self._device)  # of a span whose layers are all frozen
        return torch.cat([nothing, *(memory[it] for memory, it in self._inside(part))])

    @contextmanager
    def modify(self, part: slice = ALL) -> Iterator[Tensor]:
        values_P = self.read(part)
        yield values_P
        self._write(values_P, part)

    def fill(self, vector_E: Tensor) -> None:
        for memory, piece in zip(self._memory, self._pieces.slices, strict=True):
            memory.copy_(vector_E[piece])

    def restore(self, values_P: Tensor) -> None:
        self._write(values_P, ALL)

    def _write(self, values_P: Tensor, part: slice) -> None:
        offset = 0
        for memory, it in self._inside(part):
            memory[it].copy_(values_P[offset : offset + _length(it)])
            offset += _length(it)

    def _count(self, part: slice) -> int:
        return sum(map(_length, self._pieces.within(part)))

    def _inside(self, part: slice) -> Iterator[tuple[Tensor, slice]]:
        """By parameter, its memory and what of it belongs to the part."""
        for memory, piece, it in zip(self._memory, self._pieces.slices, self._pieces.within(part), strict=True):
            yield memory, slice(it.start - piece.start, it.stop - piece.start)


def _length(it: slice) -> int:
    return int(it.stop - it.start)
