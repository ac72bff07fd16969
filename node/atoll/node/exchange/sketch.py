"""A short random projection of a long vector. Pure.

A sketch has 128 numbers. Each element gets a random sign, and is added to one of the 128 buckets. The sketch is
linear: the sketch of a sum is the sum of the sketches. Inner products of sketches estimate those of the vectors. The
error has a standard deviation of about 1/√128 of the product of both norms. (Count sketch: Charikar, Chen and
Farach-Colton 2002, "Finding frequent items in data streams"; as a projection: Weinberger et al. 2009, arXiv:0902.2206.)

Signs and buckets follow from a seed through SHAKE-256, so they are the same on all machines. The values are fp32 sums
in any order: two sketches of one vector may differ in their last bits.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from atoll.node.exchange.partition import BLOCK_ELEMENTS

BUCKETS = 128
SKETCH_BYTES = 4 * BUCKETS
_ROW = BLOCK_ELEMENTS  # elements that are shifted together: pieces of a part begin on whole rows


class Sketcher:
    """One projection, for vectors of up to `max_elements`."""

    def __init__(self, seed: bytes, max_elements: int) -> None:
        rows = -(-max_elements // _ROW)
        stream = np.frombuffer(hashlib.shake_256(seed).digest(rows * (_ROW // 8 + 1)), dtype=np.uint8)
        signs = 1.0 - 2.0 * np.unpackbits(stream[rows:]).astype(np.float32)
        self._signs = torch.from_numpy(signs).view(rows, _ROW)
        self._shifts = torch.from_numpy(stream[:rows].astype(np.int64) % BUCKETS)

    def begin(self) -> RunningSketch:
        """The sketch of a vector that arrives in pieces."""
        return RunningSketch(self._signs, self._shifts)

    def of(self, values_E: Tensor) -> Tensor:
        """The sketch of a whole vector: fp32 [E] → fp32 [128]."""
        running = self.begin()
        running.add(0, values_E)
        return running.finish()


class RunningSketch:
    """Adds the pieces of one vector."""

    def __init__(self, signs: Tensor, shifts: Tensor) -> None:
        self._signs = signs
        self._shifts = shifts
        self._by_shift = torch.zeros(BUCKETS, _ROW)

    def add(self, first: int, values_C: Tensor) -> None:
        """Add the elements from `first` on, the start of a row."""
        row, padding = first // _ROW, -len(values_C) % _ROW
        values = (torch.nn.functional.pad(values_C, (0, padding)) if padding else values_C).view(-1, _ROW)
        rows = slice(row, row + len(values))
        self._by_shift.index_add_(0, self._shifts[rows], values * self._signs[rows])

    def finish(self) -> Tensor:
        """The sketch, fp32 [128]."""
        columns = torch.arange(BUCKETS)
        unshifted = self._by_shift.gather(1, (columns.unsqueeze(0) - columns.unsqueeze(1)) % BUCKETS)
        return unshifted.sum(dim=0)
