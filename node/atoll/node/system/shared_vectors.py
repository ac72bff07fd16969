"""Flat fp32 vectors in memory that two processes see.

The daemon opens two empty anonymous files and hands their descriptors to the trainer; the trainer, which learns
the number of elements from the model, sizes them; both map them. The files have no name, so nothing is left behind
whoever dies. A tensor over a map keeps the map alive.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from atoll.core.errors import ModelTooLarge
from atoll.core.units import bytes_text

FP32_BYTES = 4


def allocate_vector(descriptor: int, elements: int) -> None:
    """Give the file room for `elements`. Raises `ModelTooLarge`."""
    try:
        os.ftruncate(descriptor, elements * FP32_BYTES)
    except OSError as error:
        raise ModelTooLarge(
            f"no room for {bytes_text(elements * FP32_BYTES)} of shared memory: {error.strerror}",
            "free memory on this machine, or choose a smaller preset",
        ) from error


def map_vector(descriptor: int, elements: int) -> Tensor:
    """The file as an fp32 vector [E], shared with every other process that maps it."""
    if not elements:
        return torch.empty(0)
    return torch.frombuffer(mmap.mmap(descriptor, elements * FP32_BYTES), dtype=torch.float32, count=elements)
