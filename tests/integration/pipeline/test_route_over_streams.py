"""A route over gated streams, through libp2p and through direct TLS: the bits of one process, and a struck member."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
import torch
from support.routes import Reef
from support.swarm_lab import DIRECT, Lab

from atoll.core.errors import FlushAborted
from atoll.core.run_spec import OptimizerSection
from atoll.node.averaging.codecs import CODECS
from atoll.node.direct.path import DirectConfig
from atoll.node.pipeline.built_in import BuiltIn
from atoll.node.pipeline.member import RouteMember
from atoll.node.pipeline.stage import Room
from atoll.node.pipeline.wire import Channel
from atoll.node.swarm.host import SwarmHost
from atoll.node.training.shape import ModelShape

SHAPE = ModelShape(20_000, 64, 2, 4, 2, 96, tie_embeddings=True)  # its matrix takes two body frames
CHANNEL = Channel(1, 0, samples=2, tokens=32, dimension=64, vocabulary=20_000)
PATIENCE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def route() -> Reef:
    reef = Reef(BuiltIn(SHAPE), 3, OptimizerSection(), Room(2, 32))
    generator = torch.Generator().manual_seed(5)
    reef.load(torch.randn(reef.weights().numel(), generator=generator) * 0.05)
    return reef


def flush_of(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 20_000, (2, 33), generator=generator) for _ in range(3)]


async def hosts_of(lab: Lab, direct: DirectConfig | None) -> list[SwarmHost]:
    seed = await lab.start("seed", direct=None)
    hosts = [await lab.start(name, seeds=seed.multiaddrs(), direct=direct) for name in ("a", "b", "c")]
    for host in hosts:
        await host.publish_address(timedelta(minutes=5))
    for host in hosts:
        await host.lookup_addresses()
    return hosts


@asynccontextmanager
async def members_on(hosts: list[SwarmHost], reef: Reef) -> AsyncIterator[list[RouteMember]]:
    peers = [host.peer_id for host in hosts]
    members = [
        RouteMember(host, peers, runner, CHANNEL, CODECS["fp32"])
        for host, runner in zip(hosts, reef.runners, strict=True)
    ]
    running = [asyncio.create_task(member.run()) for member in members]
    yield members
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize("direct", [None, DIRECT], ids=["libp2p", "direct"])
async def test_three_hosts_have_the_bits_of_one_process(lab: Lab, direct: DirectConfig | None) -> None:
    hosts = await hosts_of(lab, direct)
    there, here = route(), route()
    async with members_on(hosts, there) as members, asyncio.timeout(PATIENCE.total_seconds()):
        for number in range(3):
            assert await members[0].flush(flush_of(number), PATIENCE) == here.route.flush(flush_of(number))
        for member in members:
            await member.over(3)
    assert torch.equal(there.weights(), here.weights())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_struck_daemon_costs_the_flush_and_changes_nothing(lab: Lab, how: signal.Signals) -> None:
    hosts = await hosts_of(lab, None)
    there = route()
    async with members_on(hosts, there) as members, asyncio.timeout(PATIENCE.total_seconds()):
        await members[0].flush(flush_of(0), PATIENCE)
        for member in members:
            await member.over(1)
        before_E = there.weights()
        os.kill(hosts[2].p2pd_pid, how)
        with pytest.raises(FlushAborted):
            await members[0].flush(flush_of(1), timedelta(seconds=2))
        assert torch.equal(there.weights(), before_E)
        if how is signal.SIGSTOP:
            os.kill(hosts[2].p2pd_pid, signal.SIGCONT)
