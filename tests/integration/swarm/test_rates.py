"""The owner's Mbit/s over libp2p, between two hosts."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest
from support.swarm_lab import Lab

from atoll.core.frames import FrameKind
from atoll.node.transport import Stream

SOON = timedelta(seconds=20)
RATE = 2e6  # bytes a second
PART = bytes(64 * 1024)
STREAMS, SECONDS = 4, 3.0


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_the_rate_holds_over_libp2p_streams(lab: Lab, who: str) -> None:
    """Within 15 %, whichever side has the limit; both sides count the same bytes."""
    seed = await lab.start("seed", relay_service=True)
    a = await lab.start("a", seeds=seed.multiaddrs())
    arrived: list[tuple[float, int]] = []

    async def swallow(stream: Stream) -> None:
        while True:
            frame = await stream.receive(SOON)
            arrived.append((time.monotonic(), len(frame.body)))

    seed.handle("/swallow/1", swallow)
    await seed.ready()
    a.traffic.limit(RATE if who == "sender" else 0.0, 0.0)
    seed.traffic.limit(0.0, RATE if who == "receiver" else 0.0)

    async def send(stream: Stream) -> None:
        while True:
            await stream.send(FrameKind.PART, b"", PART)

    streams = [await a.open(seed.peer_id, "/swallow/1", SOON) for _ in range(STREAMS)]
    sending = [asyncio.create_task(send(stream)) for stream in streams]
    await asyncio.sleep(SECONDS)
    for task in sending:
        task.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
    end = arrived[-1][0]
    counted = [(at, size) for at, size in arrived if at >= end - SECONDS * 0.6]  # after what buffers took at first
    rate = sum(size for _, size in counted[1:]) / (counted[-1][0] - counted[0][0])
    assert rate == pytest.approx(RATE, rel=0.15)
    assert seed.traffic.received["/swallow/1"] >= sum(size for _, size in arrived)
    assert a.traffic.sent["/swallow/1"] >= sum(size for _, size in arrived)
    for stream in streams:
        await stream.close()
