"""Stages on a network: the bits of one process, and no half-counted micro-batch whatever breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
import torch
from support.routes import Reef
from torch import Tensor

from atoll.core.errors import AtollError, FlushAborted, NotPermitted, PeerMisbehaved
from atoll.core.frames import Frame, FrameKind
from atoll.core.run_spec import OptimizerSection
from atoll.node.averaging.codecs import CODECS
from atoll.node.pipeline.built_in import BuiltIn
from atoll.node.pipeline.member import PROTOCOL, RouteMember
from atoll.node.pipeline.runner import Runner
from atoll.node.pipeline.stage import Room
from atoll.node.pipeline.wire import Channel
from atoll.node.training.shape import ModelShape
from atoll.node.transport_memory import MemoryHub, Passage
from atoll.v1 import pipeline_pb2 as pb

SHAPE = ModelShape(48, 16, 2, 2, 1, 24, tie_embeddings=True)
SECTION = OptimizerSection(learning_rate=0.01, clip_norm=0.3)
CHANNEL = Channel(1, 0, samples=2, tokens=6, dimension=16, vocabulary=48)
LONG, SHORT = timedelta(seconds=60), timedelta(milliseconds=200)
NAMES = ("reef", "lagoon", "atoll")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def flush_of(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 48, (2, 7), generator=generator) for _ in range(3)]


@asynccontextmanager
async def on(hub: MemoryHub, runners: list[Runner], channel: Channel = CHANNEL) -> AsyncIterator[list[RouteMember]]:
    """The runners as members of one route; the errors with which they end are theirs."""
    members = [
        RouteMember(hub.join(name), NAMES[: len(runners)], runner, channel, CODECS["fp32"])
        for name, runner in zip(NAMES, runners, strict=False)
    ]
    tasks = [asyncio.create_task(member.run()) for member in members]
    try:
        yield members
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def route() -> Reef:
    reef = Reef(BuiltIn(SHAPE), 3, SECTION, Room(2, 6))
    generator = torch.Generator().manual_seed(5)
    reef.load(torch.randn(reef.weights().numel(), generator=generator) * 0.1)
    return reef


async def test_a_route_on_a_network_has_the_bits_of_one_in_a_process() -> None:
    there, here = route(), route()
    async with on(MemoryHub(), there.runners) as members:
        for number in range(3):
            flushed = await members[0].flush(flush_of(number), LONG)
            assert flushed == here.route.flush(flush_of(number))
        for member in members:
            await member.over(3)
    assert torch.equal(there.weights(), here.weights())


async def test_a_stage_that_dies_in_a_flush_costs_the_flush_and_no_bits() -> None:
    """Cut off after each of the first messages that it sends; its runner comes back and the flush is run again."""
    plain = route()
    for number in range(2):
        plain.route.flush(flush_of(number))
    for moment in range(1, 12, 2):
        reef, hub = route(), CutOff("lagoon", moment)
        outcomes: list[bool] = []
        async with on(hub, reef.runners) as members:
            while len(outcomes) < 2 and all(outcomes):
                outcomes.append(await attempt(members[0], flush_of(len(outcomes))))
        async with on(hub, reef.runners) as members:
            for number in range(sum(outcomes), 2):
                assert await attempt(members[0], flush_of(number))
            for member in members:
                await member.over(reef.runners[0].ended)
        assert not all(outcomes)
        assert torch.equal(reef.weights(), plain.weights()), moment


async def attempt(driver: RouteMember, tokens: list[Tensor]) -> bool:
    try:
        await driver.flush(tokens, LONG)
    except FlushAborted:
        return False
    return True


class CutOff(MemoryHub):
    """Takes a peer off the network, once, when it sends so many frames."""

    def __init__(self, peer_id: str, moment: int) -> None:
        super().__init__(self._count)
        self._who, self._moment, self._sent = peer_id, moment, 0

    async def _count(self, passage: Passage) -> Frame | AtollError | None:
        self._sent += passage.sender == self._who
        if self._sent == self._moment:
            self._sent += 1
            self._cutting = asyncio.create_task(self.cut(self._who))
        return passage.frame


async def test_a_neighbour_that_accepts_and_never_answers_costs_patience_and_not_the_route() -> None:
    reef, here = route(), route()
    silent = True

    async def fault(passage: Passage) -> Frame | AtollError | None:
        return None if silent and passage.sender == "atoll" else passage.frame

    async with on(MemoryHub(fault), reef.runners) as members:
        with pytest.raises(FlushAborted, match="longer than"):
            await members[0].flush(flush_of(0), SHORT)
        for member in members:
            await member.over(1)
        silent = False
        flushed = await members[0].flush(flush_of(1), LONG)
        assert flushed.loss == here.route.flush(flush_of(1)).loss


async def test_a_stage_that_missed_the_verdict_steps_when_it_comes_back() -> None:
    reef, here = route(), route()
    here.route.flush(flush_of(0))
    deaf = True

    async def fault(passage: Passage) -> Frame | AtollError | None:
        verdict = passage.frame.kind is FrameKind.MESSAGE and pb.StageMessage.FromString(passage.frame.header)
        return None if deaf and verdict and verdict.HasField("verdict") else passage.frame

    hub = MemoryHub(fault)
    async with on(hub, reef.runners) as members:
        await members[0].flush(flush_of(0), LONG)
    assert [runner.ended for runner in reef.runners] == [1, 0, 0]
    deaf = False
    async with on(hub, reef.runners) as members:
        for member in members:
            await member.over(1)
    assert torch.equal(reef.weights(), here.weights())


async def test_strangers_second_streams_and_other_plans_are_refused() -> None:
    hub = MemoryHub()
    reef = route()
    async with on(hub, reef.runners) as members:
        await members[0].flush(flush_of(0), LONG)
        stranger = await hub.join("stranger").open("reef", PROTOCOL, LONG)
        with pytest.raises(NotPermitted):
            await stranger.receive(LONG)
    async with on(hub, route().runners, Channel(2, 0, 2, 6, 16, 48)) as members:
        other = RouteMember(hub.join("lagoon"), NAMES, route().runners[1], CHANNEL)
        task = asyncio.create_task(other.run())
        with pytest.raises(FlushAborted):
            await members[0].flush(flush_of(0), LONG)
        with pytest.raises((PeerMisbehaved, FlushAborted)):
            await asyncio.gather(task)
