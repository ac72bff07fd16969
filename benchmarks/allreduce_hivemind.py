"""hivemind in the all-reduce benchmark; runs in hivemind's own environment."""

from __future__ import annotations

import asyncio
from typing import Any

import hivemind
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization
from torch import Tensor

from benchmarks.hivemind_dht import HivemindDht


class Hivemind:
    """`DecentralizedAverager`, triggered once all have found each other."""

    def __init__(self, index: int, members: int, address: str) -> None:
        self._index = index
        self._members = members
        self._meeting = HivemindDht(address)
        self._averager: Any = None
        self._step: Any = None

    async def connect(self, contacts: list[Any]) -> Any:
        return self._meeting.connect(contacts)

    async def prepare(self, vector_E: Tensor, codec: str, number: int, mbit: list[float]) -> None:
        if self._averager is None:
            self._averager = self._start(vector_E, codec, mbit[self._index])  # it wants the main thread
        with self._averager.get_tensors() as tensors:
            tensors[0].copy_(vector_E)
        self._step = self._averager.step(wait=False, require_trigger=True, allow_retries=False, timeout=600)
        async with asyncio.timeout(60):
            while self._step.stage.name != "AWAITING_TRIGGER":
                if self._step.done():
                    self._step.result()
                await asyncio.sleep(0.05)

    async def average(self, seconds: float) -> Tensor:
        self._step.allow_allreduce()
        gathered = await asyncio.to_thread(self._step.result, seconds)
        if gathered is None or len(gathered) != self._members:
            raise RuntimeError(f"a group of {len(gathered or ())} instead of {self._members}")
        with self._averager.get_tensors() as tensors:
            result: Tensor = tensors[0]  # nobody changes it before the next round
            return result

    async def close(self) -> None:
        for part in (self._averager, self._meeting.dht):
            if part is not None:
                await asyncio.to_thread(part.shutdown)

    def _start(self, vector_E: Tensor, codec: str, mbit: float) -> Any:
        compression = {"fp32": NoCompression, "fp16": Float16Compression, "int8": Uniform8BitQuantization}[codec]()
        return hivemind.DecentralizedAverager(
            [vector_E.clone()],
            dht=self._meeting.dht,
            prefix="bench",
            target_group_size=self._members,
            min_group_size=self._members,
            min_matchmaking_time=8.0,
            request_timeout=4.0,
            compression=compression,
            bandwidth=mbit,
            start=True,
        )
