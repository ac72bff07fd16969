"""torchft in the all-reduce benchmark; runs in torchft's own environment."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor
from torchft.manager import IS_TRITON_AVAILABLE, Manager

from benchmarks.torchft_replica import Replica


class Torchft:
    """`Manager.allreduce` of one flat tensor over gloo, then the vote; fp16 as half tensors, which it also sums so."""

    def __init__(self, index: int, members: int, address: str) -> None:
        self._replica = Replica(index, members, address)
        self._manager: Manager | None = None
        self._vector_E: Tensor
        self._quantised = False

    async def meet(self, contacts: list[Any]) -> Any:
        if all(contacts):
            self._manager = await asyncio.to_thread(self._replica.manager, contacts[0])
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
        self._manager.allreduce(self._vector_E, should_quantize=self._quantised).wait()
        error = self._manager.errored()
        if not self._manager.should_commit():
            raise RuntimeError(f"no commit: {error.original_exception if error else 'too few replicas'}")
