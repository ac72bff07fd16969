"""torchft in the all-reduce benchmark; runs in torchft's own environment."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor
from torchft.manager import IS_TRITON_AVAILABLE, Manager

from benchmarks.torchft_replica import Replica


class Torchft:
    """`Manager.allreduce` over gloo, then the vote; fp16 as half tensors, which it also sums so."""

    def __init__(self, index: int, members: int, address: str, *, pieces: int, devices: int) -> None:
        """The vector goes in so many pieces at once, over the one network device named so many times."""
        self._pieces = pieces
        self._devices = devices
        self._replica = Replica(index, members, address)
        self._manager: Manager | None = None
        self._vector_E: Tensor
        self._quantised = False

    async def connect(self, contacts: list[Any]) -> Any:
        if all(contacts):
            self._manager = await asyncio.to_thread(self._replica.manager, contacts[0], self._devices)
        return self._replica.lighthouse() or "here"

    async def prepare(self, vector_E: Tensor, codec: str, number: int, mbit: list[float]) -> None:
        assert self._manager is not None
        self._quantised = codec == "int8"
        if self._quantised and not (IS_TRITON_AVAILABLE and torch.cuda.is_available()):
            raise RuntimeError("torchft quantises on GPUs only")
        self._vector_E = vector_E.half() if codec == "fp16" else vector_E.clone()
        await asyncio.to_thread(self._manager.start_quorum)

    async def average(self, seconds: float) -> Tensor:
        await asyncio.to_thread(self._all_reduce)
        return self._vector_E

    async def close(self) -> None:
        await asyncio.to_thread(self._replica.close)

    def _all_reduce(self) -> None:
        assert self._manager is not None
        for work in [
            self._manager.allreduce(piece_E, should_quantize=self._quantised)
            for piece_E in self._vector_E.chunk(self._pieces)
        ]:
            work.wait()
        error = self._manager.errored()
        if not self._manager.should_commit():
            raise RuntimeError(f"no commit: {error.original_exception if error else 'too few replicas'}")
