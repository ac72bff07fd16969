"""The exchange over real streams, while the daemon of one member is killed or stopped in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from support.exchange_swarm import into
from support.loopback_hosts import Lab

from atoll.core.round_id import RoundId
from atoll.node.exchange.allreduce import Exchange
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.exchange.partition import partition
from atoll.node.exchange.screening import Screen
from atoll.node.rounds.settlement import settle
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

ELEMENTS, PART = 4_000_000, 65_536
ROUND = RoundId("reef", 1, 0, 1, 0)
STALL = timedelta(seconds=10)  # no survivor is silent for so long
IN_TIME = timedelta(seconds=240)  # a few times `STALL`, and what a busy machine computes
TIMEOUT = timedelta(hours=1)
REPAIR = timedelta(seconds=120)
ENOUGH = ELEMENTS // 6  # bytes of int8 that the victim's neighbour has sent when the victim is struck


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_survivors_of_a_struck_daemon_end_equal_and_in_time(lab: Lab, how: signal.Signals) -> None:
    seed = await lab.start("seed", direct=None)
    hosts = [await lab.start(name, seeds=seed.multiaddrs(), direct=None) for name in ("a", "b", "c")]
    for host in hosts:
        await host.publish_address(timedelta(minutes=5))
    for host in hosts:
        await host.lookup_addresses()
    peers = [host.peer_id for host in hosts]
    start = dp.Start(
        round=ROUND.to_proto(),
        contributions=[manifest_pb2.Contribution(peer_id=peer, tokens=1, weight=1) for peer in peers],
        partition=[
            dp.PartRange(reducer=piece.reducer, start=piece.start, end=piece.end)
            for piece in partition(ELEMENTS, peers, {})
        ],
        codec=CODECS["int8"].number,
        elements=ELEMENTS,
        part_elements=PART,
    )
    averages = [torch.full((ELEMENTS,), float("nan")) for _ in hosts]
    executor = ThreadPoolExecutor(2)
    exchanges = []
    for host, average_E in zip(hosts, averages, strict=True):
        vector_E = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(len(exchanges)))
        server = ExchangeServer(host, TIMEOUT)
        exchanges.append(Exchange(start, host, vector_E, into(average_E), executor, TIMEOUT, STALL, screen=Screen(1.0)))
        server.begin(exchanges[-1])

    running = [asyncio.create_task(exchange.run()) for exchange in exchanges]
    async with asyncio.timeout(IN_TIME.total_seconds()):
        while exchanges[0].bytes_sent < ENOUGH:
            await asyncio.sleep(0)
    os.kill(hosts[2].p2pd_pid, how)
    survivors = peers[:2]
    async with asyncio.timeout(IN_TIME.total_seconds()):
        held = dict(zip(survivors, await asyncio.gather(*running[:2]), strict=True))
    settled = settle(held, survivors)
    digests = settled.digests
    missing = sum(not digest for digest in digests)
    assert all(result.partial == (peers[2],) for result in held.values())
    assert 0 < missing < len(digests)
    assert all(digest for digest in digests[: 2 * len(digests) // 3 - 1])  # the survivors' own shares

    def sources(part: int) -> tuple[str, ...]:
        return (*settled.holders.get(part, ()), *settled.whole)

    await asyncio.gather(*(exchange.repair(digests, sources, REPAIR) for exchange in exchanges[:2]))
    assert torch.equal(averages[0], averages[1])
    assert bool(torch.isfinite(averages[0]).all())

    if how is signal.SIGSTOP:
        os.kill(hosts[2].p2pd_pid, signal.SIGCONT)
    running[2].cancel()
    await asyncio.wait(running)
    for exchange in exchanges:
        exchange.end()
    executor.shutdown()
