"""Flat fp32 vectors in memory shared by two processes.

The daemon opens empty anonymous files and passes their descriptors to the trainer. The trainer learns the number of
elements from the model and sizes the files; both processes map them. The files have no name, so a crash of either
process leaves nothing behind. A tensor over a map keeps the map alive.
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
    """Size the file for `elements` fp32 numbers. Raises `ModelTooLarge`."""
    try:
        os.ftruncate(descriptor, elements * FP32_BYTES)
    except OSError as error:
        raise ModelTooLarge(
            f"cannot allocate {bytes_text(elements * FP32_BYTES)} of shared memory: {error.strerror}",
            "free memory on this machine, or choose a smaller preset",
        ) from error


def map_vector(descriptor: int, elements: int) -> Tensor:
    """Map the file as an fp32 vector [E], shared with every other process that maps it."""
    if not elements:
        return torch.empty(0)
    return torch.frombuffer(mmap.mmap(descriptor, elements * FP32_BYTES), dtype=torch.float32, count=elements)
