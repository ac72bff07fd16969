"""Members of one exchange on a memory hub, faults for them, and the truth about their averages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from itertools import chain, combinations

import torch
from support.memory_network import Fault, FrameInTransit, MemoryHub
from support.virtual_time import Inline

from atoll.core.frames import Frame, FrameKind
from atoll.core.round_id import RoundId
from atoll.node.exchange.allreduce import Exchange, ExchangeResult
from atoll.node.exchange.auditor import Dispute
from atoll.node.exchange.averaged_parts import Average, AverageSink
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.exchange.partition import Part, partition
from atoll.node.exchange.screening import Screen
from atoll.node.exchange.weighted_sum import weighted_mean
from atoll.node.rounds.settlement import settle
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

ELEMENTS, PART = 5_000, 512
STALL = timedelta(seconds=4)
TIMEOUT = timedelta(seconds=100)
ROUND = RoundId("r", 1, 0, 1, 0)


def into(vector_E: torch.Tensor) -> AverageSink:
    """The average itself, as one vector."""
    return lambda start, values_E: vector_E[start : start + len(values_E)].copy_(values_E)


def start_message(weights: Mapping[str, int], codec: str, bandwidth: Mapping[str, int] | None = None) -> dp.Start:
    pieces = partition(ELEMENTS, list(weights), bandwidth or {})
    return dp.Start(
        round=ROUND.to_proto(),
        contributions=[manifest_pb2.Contribution(peer_id=p, tokens=w, weight=w) for p, w in weights.items()],
        partition=[dp.PartRange(reducer=r.reducer, start=r.start, end=r.end) for r in pieces],
        codec=CODECS[codec].number,
        elements=ELEMENTS,
        part_elements=PART,
    )


class Swarm:
    """Every member's exchange. `begin` some, `finish` those that were begun, `settle_and_repair`, `assert_true`."""

    def __init__(
        self,
        weights: Mapping[str, int],
        codec: str = "int4",
        bandwidth: Mapping[str, int] | None = None,
        fault: Fault | None = None,
        executor: Executor | None = None,
        patience: timedelta = TIMEOUT,
        screening: bool = False,  # vectors here have nothing in common
    ) -> None:
        self.hub = MemoryHub(fault) if fault else MemoryHub()
        self.weights = dict(weights)
        self.screening = screening
        self.codec = CODECS[codec]
        self.start = start_message(weights, codec, bandwidth)
        self.vectors = {
            p: torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(weights)
        }
        self.averages = {p: torch.full((ELEMENTS,), float("nan")) for p in weights}
        self.executor = executor or Inline()
        self.networks = {p: self.hub.join(p) for p in weights}
        self.servers = {p: ExchangeServer(n, patience) for p, n in self.networks.items()}
        self.exchanges: dict[str, Exchange] = {}
        self.tasks: dict[str, asyncio.Task[ExchangeResult]] = {}
        self.held: dict[str, ExchangeResult] = {}
        self.settled: tuple[bytes, ...] = ()
        self.seconds = 0.0  # that the exchange took until the last member was done
        self.layout = Average(self.start, into(torch.empty(0)), self.executor)
        self.total = len(self.layout)

    def parts_of(self, reducer: str) -> list[int]:
        reducer_shares = [share for share in self.layout.reducer_shares if share.reducer == reducer]
        return [share.first + part.index for share in reducer_shares for part in share.parts]

    def frames_of(self, reducer: str) -> list[tuple[int, int]]:
        """Index within the share, and elements, of each part of it."""
        share = next(share for share in self.layout.reducer_shares if share.reducer == reducer)
        return [(part.index, part.elements) for part in share.parts]

    async def begin(
        self, peers: Sequence[str] = (), timeout: timedelta = TIMEOUT, delays: Mapping[str, float] | None = None
    ) -> None:
        for peer in peers or self.weights:
            self.tasks[peer] = asyncio.create_task(self._run(peer, timeout, (delays or {}).get(peer, 0.0)))

    async def _run(self, peer: str, timeout: timedelta, delay: float) -> ExchangeResult:
        await asyncio.sleep(delay)  # Start is under way
        exchange = Exchange(
            self.start,
            self.networks[peer],
            self.vectors[peer],
            into(self.averages[peer]),
            self.executor,
            timeout,
            STALL,
            screen=Screen(max_change_per_token=1.0) if self.screening else None,
        )
        self.exchanges[peer] = exchange
        self.servers[peer].begin(exchange)
        return await exchange.run()

    async def finish(self) -> None:
        began = asyncio.get_running_loop().time()
        for peer, task in self.tasks.items():
            self.held[peer] = await task
        self.seconds = asyncio.get_running_loop().time() - began

    async def run(self, **options: object) -> None:
        await self.begin(**options)  # type: ignore[arg-type]
        await self.finish()

    async def die(self, peer: str) -> None:
        """SIGKILL: its streams end, nothing of it goes on."""
        self.tasks.pop(peer).cancel()
        await self.hub.cut(peer)

    async def settle_and_repair(self, present: Sequence[str], timeout: timedelta = TIMEOUT) -> None:
        settled = settle(self.held, present)
        self.settled = settled.digests

        def sources(part: int) -> tuple[str, ...]:
            return (*settled.holders.get(part, ()), *settled.whole)

        await asyncio.gather(*(self.exchanges[peer].repair(settled.digests, sources, timeout) for peer in present))

    async def audit(self, present: Sequence[str], seed: bytes = bytes(32)) -> dict[str, tuple[Dispute, ...]]:
        """What each member that is present finds, after `settle_and_repair`."""
        told = dp.Settle(
            verdicts=[verdict for peer in present for verdict in self.held[peer].verdicts],
        )
        found = [self.exchanges[peer].audit(seed, present, told, STALL, TIMEOUT) for peer in present]
        return dict(zip(present, await asyncio.gather(*found), strict=True))

    def assert_true(self, present: Sequence[str]) -> list[frozenset[str]]:
        """Those present hold the same bits, and each part is what its reducer gets from some of the contributors, all
        but those named as partial; returns who was counted in each part (nobody: zeroed)."""
        first = self.averages[present[0]]
        for peer in present:
            assert torch.equal(self.averages[peer], first), peer
        everyone = {peer for peer, weight in self.weights.items() if weight}
        partial = {name for peer in present for name in self.held[peer].partial}
        counted = []
        for share in self.layout.reducer_shares:
            for part in share.parts:
                peers = self._counted(share.first + part.index, share.reducer, part, first)
                assert not peers or share.reducer not in present or everyone - peers <= partial
                counted.append(peers)
        return counted

    def _counted(self, index: int, reducer: str, part: Part, average: torch.Tensor) -> frozenset[str]:
        values = average[part.start : part.end]
        if not self.settled[index]:
            assert not values.any()
            return frozenset()
        given = {}
        for peer in (peer for peer, weight in self.weights.items() if weight):
            own = self.vectors[peer][part.start : part.end]
            finite = bool(torch.isfinite(own).all())
            given[peer] = (
                self.codec.decode(self.codec.encode(own), part.elements) if peer != reducer and finite else own
            )
        sizes = range(len(given), 0, -1)
        for subset in chain.from_iterable(combinations(given, size) for size in sizes):
            mean = weighted_mean([given[peer] for peer in subset], [self.weights[peer] for peer in subset])
            if not bool(torch.isfinite(mean).all()):
                continue
            if torch.equal(self.codec.decode(self.codec.encode(mean), part.elements), values):
                return frozenset(subset)
        raise AssertionError(f"part {index} is the mean of no set of contributors")

    def assert_nobody_blamed_but(self, liar: str) -> None:
        """The others name no honest member, and no handler crashed on what the liar sent."""
        for peer in self.held.keys() - {liar}:
            assert set(self.held[peer].faults) <= {liar}
            assert set(self.held[peer].partial) <= {liar}
        assert not any(network.crashes for network in self.networks.values())

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        for server in self.servers.values():
            server.end(ROUND)
        await self.hub.close()


def reheaded(frame: Frame, **changes: int) -> Frame:
    """A part frame with other words in its header."""
    header = dp.PartHeader.FromString(frame.header)
    for key, value in changes.items():
        setattr(header, key, value)
    return Frame(frame.kind, header.SerializeToString(), frame.body)


def part_frames(sender: str, receiver: str, nth: int, change: Callable[[Frame], Frame]) -> Fault:
    """A fault that changes the `nth` part frame from `sender` to `receiver`, counted from 0."""
    passed = 0

    async def fault(passage: FrameInTransit) -> Frame:
        nonlocal passed
        frame = passage.frame
        if (passage.sender, passage.receiver, frame.kind) != (sender, receiver, FrameKind.PART):
            return frame
        passed += 1
        return change(frame) if passed == nth + 1 else frame

    return fault
