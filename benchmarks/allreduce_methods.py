"""What runs in our own environment of the all-reduce benchmark: Atoll's exchange and gloo's ring."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.coordinator.planner.reduce_shares import NodeLink, best_shares, reduce_rate
from atoll.core.round_id import RoundId
from atoll.lab.wan.hub import DEVICE
from atoll.node.exchange.allreduce import Exchange
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.exchange.partition import part_elements, partition
from atoll.node.exchange.screening import Screen
from atoll.node.swarm.host import SwarmHost
from atoll.node.system.malloc_arenas import limit_malloc_arenas
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2
from benchmarks.member_host import greet_all, peer_of, start_member

_RUN = "bench"
_START = timedelta(seconds=30)
_STALL = timedelta(seconds=15)


class Atoll:
    """The exchange that nodes run, without what decides about rounds around it."""

    def __init__(self, index: int, address: str, directory: Path, *, direct: bool) -> None:
        limit_malloc_arenas()  # as a node does
        self._index = index
        self._address = address
        self._directory = directory
        self._direct = direct
        self._host: SwarmHost | None = None
        self._server: ExchangeServer
        self._peers: list[str] = []
        self._executor = ThreadPoolExecutor(2)
        self._exchange: Exchange | None = None
        self._average_E: Tensor

    async def connect(self, contacts: list[Any]) -> Any:
        if self._host is None:
            self._host = await start_member(
                self._directory, self._index, contacts, run_id=_RUN, address=self._address, direct=self._direct
            )
            self._server = ExchangeServer(self._host, _START)
            await self._host.ready()
            return self._host.multiaddrs()
        self._peers = [peer_of(addresses) for addresses in contacts]
        await greet_all(self._host, contacts)
        return None

    async def prepare(self, vector_E: Tensor, codec: str, number: int, mbit: list[float]) -> None:
        assert self._host is not None
        elements = len(vector_E)
        chosen = CODECS[codec]
        ranges = partition(elements, self._peers, planned_rates(dict(zip(self._peers, mbit, strict=True))))
        start = dp.Start(
            round=RoundId(_RUN, 1, 0, number + 1, 0).to_proto(),
            contributions=[manifest_pb2.Contribution(peer_id=it, tokens=1, weight=1) for it in self._peers],
            partition=[dp.PartRange(reducer=piece.reducer, start=piece.start, end=piece.end) for piece in ranges],
            codec=chosen.number,
            elements=elements,
            part_elements=part_elements(ranges, chosen.encoded_bytes, 2**20),
        )
        if self._exchange is not None:
            self._server.end(self._exchange.round_id)
        average_E = self._average_E = torch.zeros(elements)
        patience = timedelta(minutes=10)
        self._exchange = Exchange(
            start,
            self._host,
            vector_E,
            lambda first, values_E: average_E[first : first + len(values_E)].copy_(values_E),
            self._executor,
            patience,
            _STALL,
            screen=Screen(max_change_per_token=1.0),
        )
        self._server.begin(self._exchange)

    async def average(self, seconds: float) -> Tensor:
        assert self._exchange is not None
        held = await self._exchange.run()
        if not all(held.digests) or held.partial:
            raise RuntimeError(f"{held.digests.count(b'')} of {len(held.digests)} parts are missing, or lack somebody")
        return self._average_E

    async def close(self) -> None:
        if self._exchange is not None:
            self._server.end(self._exchange.round_id)
        self._executor.shutdown()
        if self._host is not None:
            await self._host.close(timedelta(seconds=5))


def planned_rates(mbit: dict[str, float]) -> dict[str, int]:
    """What a plan has each reduce, by peer id, once nodes have said what they measured of their uplinks."""
    shares = best_shares({peer: NodeLink(rate * 1e6 / 8) for peer, rate in mbit.items()})
    return {peer: reduce_rate(share, len(mbit)) for peer, share in shares.items()}


class Gloo:
    """`torch.distributed.all_reduce` on CPU tensors; fp16 as half tensors, which it also sums so."""

    def __init__(self, index: int, members: int, directory: Path, *, pieces: int, devices: int) -> None:
        """The vector goes in so many pieces at once, over the one network device named so many times."""
        self._pieces = pieces
        self._devices = devices
        self._index = index
        self._members = members
        self._directory = directory
        self._vector_E: Tensor

    async def connect(self, contacts: list[Any]) -> Any:
        if len([it for it in contacts if it]) == self._members:
            os.environ["GLOO_SOCKET_IFNAME"] = ",".join([DEVICE] * self._devices)
            await asyncio.to_thread(
                torch.distributed.init_process_group,
                "gloo",
                init_method=f"file://{self._directory}/gloo",
                rank=self._index,
                world_size=self._members,
            )
        return "here"

    async def prepare(self, vector_E: Tensor, codec: str, number: int, mbit: list[float]) -> None:
        self._vector_E = vector_E.half() if codec == "fp16" else vector_E.clone()

    async def average(self, seconds: float) -> Tensor:
        await asyncio.to_thread(self._all_reduce)
        return self._vector_E.div_(self._members)

    def _all_reduce(self) -> None:
        for work in [
            torch.distributed.all_reduce(piece_E, async_op=True) for piece_E in self._vector_E.chunk(self._pieces)
        ]:
            work.wait()

    async def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
