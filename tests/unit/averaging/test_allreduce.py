"""The butterfly: equal bits on every member, whatever the codec loses; all or nothing when a part is bad."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from atoll.core.errors import RoundAbandoned
from atoll.core.frames import Frame, FrameKind
from atoll.core.round_id import RoundId
from atoll.node.averaging.allreduce import PROTOCOL, Exchange, ExchangeServer
from atoll.node.averaging.codecs import CODECS
from atoll.node.averaging.partition import partition
from atoll.node.transport_memory import MemoryHub
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

ELEMENTS, PART = 5_000, 512
TIMEOUT = timedelta(seconds=3)
ROUND = RoundId("r", 1, 0, 1, 0)


def start_message(weights: dict[str, int], codec: str, bandwidth=None) -> dp.Start:
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
    def __init__(self, weights, codec="int4", bandwidth=None, fault=None, timeout=TIMEOUT):
        self.hub = MemoryHub(fault) if fault else MemoryHub()
        self.start = start_message(weights, codec, bandwidth)
        self.vectors = {
            p: torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(weights)
        }
        self.averages = {p: torch.full((ELEMENTS,), float("nan")) for p in weights}
        self.executor = ThreadPoolExecutor(2)
        self.networks = {p: self.hub.join(p) for p in weights}
        self.servers = {p: ExchangeServer(n, timeout) for p, n in self.networks.items()}
        self.timeout = timeout

    def exchange(self, peer):
        return Exchange(
            self.start, self.networks[peer], self.vectors[peer], self.averages[peer], self.executor, self.timeout
        )

    async def run(self, peers=None, stagger=0.0):
        async def one(i, peer):
            await asyncio.sleep(stagger * i)  # Start reaches members at different moments
            exchange = self.exchange(peer)
            self.servers[peer].begin(exchange)
            await exchange.run()
            return exchange.bytes_sent

        tasks = [one(i, peer) for i, peer in enumerate(peers or self.networks)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await self.hub.close()
        self.executor.shutdown()
        return results


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_everyone_ends_with_the_same_bits_near_the_weighted_mean(codec, size):
    weights = {f"p{i}": 10 * (i + 1) for i in range(size)}
    swarm = Swarm(weights, codec)
    results = await swarm.run(stagger=0.02)
    assert all(isinstance(sent, int) for sent in results), results
    first = next(iter(swarm.averages.values()))
    for average in swarm.averages.values():
        assert torch.equal(average, first)
    exact = sum(swarm.vectors[p] * w for p, w in weights.items()) / sum(weights.values())
    tolerance = {"fp32": 1e-6, "fp16": 4e-3, "bf16": 3e-2, "int8": 6e-2, "int4": 0.9}[codec]
    assert float((first - exact).abs().max()) < tolerance


async def test_a_member_of_weight_zero_receives_without_contributing():
    swarm = Swarm({"a": 5, "b": 0, "c": 5}, "fp32")
    await swarm.run()
    exact = (swarm.vectors["a"] + swarm.vectors["c"]) / 2
    for average in swarm.averages.values():
        assert torch.allclose(average, exact, atol=1e-6)


async def test_a_member_without_upload_reduces_nothing():
    swarm = Swarm({"a": 1, "b": 1, "c": 1}, "fp32", bandwidth={"a": 10, "b": 10, "c": 0})
    results = await swarm.run()
    assert all(isinstance(sent, int) for sent in results)
    assert results[2] < results[0]


def damage(change):
    """A fault that changes the first part frame that "b" sends."""
    done = []

    async def fault(passage):
        if passage.sender == "b" and passage.frame.kind is FrameKind.PART and not done:
            done.append(True)
            return change(passage.frame)
        return passage.frame

    return fault


def reheaded(frame, **changes):
    header = dp.PartHeader.FromString(frame.header)
    for key, value in changes.items():
        setattr(header, key, value)
    return Frame(frame.kind, header.SerializeToString(), frame.body)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: Frame(f.kind, f.header, bytes(f.body)[:-1]),
        lambda f: Frame(f.kind, f.header, bytes(f.body) + b"\0"),
        lambda f: Frame(f.kind, f.header, b"\xff" * len(f.body)),
        lambda f: Frame(f.kind, b"\xff\xff\xff", f.body),
        lambda f: Frame(FrameKind.BODY, f.header, f.body),
        lambda f: reheaded(f, index=3),
        lambda f: reheaded(f, elements=1),
        lambda f: reheaded(f, codec=1),
    ],
    ids=["short", "long", "nan", "no header", "other kind", "out of turn", "broadcast", "other codec"],
)
async def test_a_bad_part_fails_the_round_for_its_receiver(change):
    swarm = Swarm({"a": 1, "b": 1, "c": 1}, "fp16", fault=damage(change), timeout=timedelta(seconds=1))
    results = await swarm.run()
    assert any(isinstance(result, RoundAbandoned) for result in results)


async def test_a_member_that_never_comes_ends_in_time():
    swarm = Swarm({"a": 1, "b": 1, "c": 1}, "fp32", timeout=timedelta(seconds=0.5))
    async with asyncio.timeout(5):
        results = await swarm.run(peers=["a", "b"])
    assert all(isinstance(result, RoundAbandoned) for result in results)


async def test_a_second_stream_of_one_sender_is_refused_and_outsiders_too():
    swarm = Swarm({"a": 1, "b": 1}, "fp32", timeout=timedelta(seconds=1))
    outsider = swarm.hub.join("x")
    header = dp.ExchangeHeader(round=ROUND.to_proto()).SerializeToString()

    async def intrude(network):
        stream = await network.open("a", PROTOCOL, TIMEOUT)
        await stream.send(FrameKind.MESSAGE, header)
        return await stream.receive(TIMEOUT)

    exchange = swarm.exchange("a")
    swarm.servers["a"].begin(exchange)
    first = await swarm.networks["b"].open("a", PROTOCOL, TIMEOUT)
    await first.send(FrameKind.MESSAGE, header)
    running = asyncio.create_task(exchange.run())
    refused = await asyncio.gather(intrude(swarm.networks["b"]), intrude(outsider), return_exceptions=True)
    assert "second stream" in str(refused[0])
    assert "no part" in str(refused[1])
    with pytest.raises(RoundAbandoned):
        await running
    await swarm.hub.close()
    swarm.executor.shutdown()
