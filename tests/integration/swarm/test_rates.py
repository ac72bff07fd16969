"""The owner's rate limits between two hosts, over libp2p and direct connections."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest
from support.loopback_hosts import DIRECT, Lab

from atoll.core.frames import FrameKind
from atoll.node.direct.stream import DirectStream
from atoll.node.wire.transport import Stream

SOON = timedelta(seconds=60)
RATE = 2e6  # bytes a second
PART = bytes(64 * 1024)
STREAMS, SECONDS, LOOKS = 4, 3.0, 40


def rate_of(arrived: list[tuple[float, int]]) -> float:
    """Measure bytes per second, after the buffers have filled."""
    counted = [(at, size) for at, size in arrived if at >= arrived[-1][0] - SECONDS * 0.6]
    return sum(size for _, size in counted[1:]) / (counted[-1][0] - counted[0][0])


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("path", ["libp2p", "direct"])
async def test_the_rate_holds_over_streams(lab: Lab, who: str, path: str) -> None:
    """Within 15 %, whichever side has the limit; both sides count the same bytes."""
    seed = await lab.start("seed", relay_service=True)
    a = await lab.start("a", seeds=seed.multiaddrs(), direct=DIRECT if path == "direct" else None)
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
    assert all(isinstance(stream, DirectStream) == (path == "direct") for stream in streams)
    sending = [asyncio.create_task(send(stream)) for stream in streams]
    for _ in range(LOOKS):  # a machine that stops for a moment sends less in it
        await asyncio.sleep(SECONDS)
        rate = rate_of(arrived)
        if rate == pytest.approx(RATE, rel=0.15):
            break
    for task in sending:
        task.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
    assert rate == pytest.approx(RATE, rel=0.15)
    assert seed.traffic.received["/swallow/1"] >= sum(size for _, size in arrived)
    assert a.traffic.sent["/swallow/1"] >= sum(size for _, size in arrived)
    for stream in streams:
        await stream.close()
