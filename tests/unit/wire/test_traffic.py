"""Rate limits: never faster over any interval, streams take turns, and without a limit no stream waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_time import LoopClock, in_virtual_time

from atoll.core.clock import ManualClock
from atoll.core.errors import Busy, Unreachable
from atoll.core.frames import FrameKind
from atoll.node.wire.streams import SocketStream
from atoll.node.wire.traffic import RateLimiter, Traffic

RATE = 1e6
BURST = 0.1 * RATE


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 200_000)), min_size=1, max_size=60))
def test_over_any_span_no_more_than_the_rate_passes(asked: list[tuple[float, int]]) -> None:
    clock = ManualClock()
    line = RateLimiter(clock)
    line.set_rate(RATE)
    clock.advance(10)
    granted = []
    for pause, count in asked:
        clock.advance(pause)
        granted.append((max(clock.monotonic(), line.slot_start(count, small=False)), count))
    assert [at for at, _ in granted] == sorted(at for at, _ in granted)  # in the order of asking
    for first, (start, _) in enumerate(granted):
        for last in range(first, len(granted)):
            passed = sum(count for _, count in granted[first:last])
            assert passed <= (granted[last][0] - start) * RATE + BURST + 1


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 1e5, 1e9]))
def test_pieces_are_the_same_bytes(size: int, rate: float) -> None:
    line = RateLimiter(ManualClock())
    line.set_rate(rate)
    data = bytes(size)
    pieces = list(line.pieces([b"head", memoryview(data)], 10**6))
    assert b"".join(pieces) == b"head" + data
    assert rate or len(pieces) == 2


def test_small_frames_are_charged_but_do_not_wait() -> None:
    line = RateLimiter(ManualClock())
    line.set_rate(1000.0)
    assert line.slot_start(50_000, small=False) <= 0.0
    assert line.slot_start(100, small=True) == 0.0
    assert line.slot_start(1, small=False) == pytest.approx(50.1, abs=0.2)
    line.set_rate(0.0)
    assert line.slot_start(10**9, small=False) == 0.0


@contextlib.asynccontextmanager
async def pair(path: Path, sender: Traffic, receiver: Traffic) -> AsyncIterator[tuple[SocketStream, SocketStream]]:
    """Two ends of a real stream socket."""
    arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
    server = await asyncio.start_unix_server(lambda *ends: arrived.set_result(ends), path, limit=1 << 16)
    near = await asyncio.open_unix_connection(path)
    one = SocketStream("peer", "/p/1", *near, require_member=lambda: None, traffic=sender)
    two = SocketStream("peer", "/p/1", *(await arrived), require_member=lambda: None, traffic=receiver)
    try:
        yield one, two
    finally:
        await asyncio.gather(one.close(), two.close())
        server.close()


@pytest.mark.parametrize("limited", ["up", "down"])
@in_virtual_time
async def test_streams_share_the_rate_evenly(tmp_path: Path, limited: str) -> None:
    """Four streams at 8 Mbit/s for a second: within 15 % of the rate, and of one another."""
    clock = LoopClock()
    sender, receiver = Traffic(clock), Traffic(clock)
    (sender if limited == "up" else receiver).limit(*((RATE, 0.0) if limited == "up" else (0.0, RATE)))
    got = [0] * 4

    async def send(stream: SocketStream) -> None:
        while True:
            await stream.send(FrameKind.PART, b"h", bytes(20_000))

    async def receive(number: int, stream: SocketStream) -> None:
        while True:
            got[number] += len((await stream.receive(timedelta(seconds=30))).body)

    async with contextlib.AsyncExitStack() as open_streams:
        ends = [await open_streams.enter_async_context(pair(tmp_path / f"{i}", sender, receiver)) for i in range(4)]
        tasks = [asyncio.create_task(send(one)) for one, _ in ends]
        tasks += [asyncio.create_task(receive(number, two)) for number, (_, two) in enumerate(ends)]
        await asyncio.sleep(0.5)  # what the sockets buffer
        before = list(got)
        await asyncio.sleep(1.5)
        passed = [now - then for now, then in zip(got, before, strict=True)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(passed) / 1.5 == pytest.approx(RATE, rel=0.15)
    assert max(passed) < 1.4 * min(passed)
    assert sender.sent["/p/1"] >= receiver.received["/p/1"] > 0
    assert sender.bytes_total == sender.sent.total()


@in_virtual_time
async def test_a_vote_does_not_wait_behind_bulk(tmp_path: Path) -> None:
    sender, receiver = Traffic(LoopClock()), Traffic(LoopClock())
    sender.limit(1e5, 0.0)
    async with pair(tmp_path / "a", sender, receiver) as (bulk, _), pair(tmp_path / "b", sender, receiver) as ends:
        sending = asyncio.create_task(bulk.send(FrameKind.PART, b"", bytes(10**6)))  # ten seconds' worth
        await asyncio.sleep(0.01)
        async with asyncio.timeout(1):
            await ends[0].send(FrameKind.MESSAGE, b"yes")
            assert (await ends[1].receive(timedelta(seconds=1))).header == b"yes"
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        with pytest.raises(Unreachable):  # a torn frame ends its stream
            await bulk.send(FrameKind.MESSAGE, b"")


@in_virtual_time
async def test_a_spent_allowance_stops_bodies_both_ways_and_nothing_else(tmp_path: Path) -> None:
    sender, receiver = Traffic(LoopClock()), Traffic(LoopClock())
    async with pair(tmp_path / "a", sender, receiver) as (one, two):
        receiver.set_remaining_bytes(100)
        await one.send(FrameKind.PART, b"", bytes(200))  # begun within the allowance
        await two.receive(timedelta(seconds=1))
        await one.send(FrameKind.MESSAGE, b"vote")
        assert (await two.receive(timedelta(seconds=1))).header == b"vote"
        await two.send(FrameKind.MESSAGE, b"mine")
        with pytest.raises(Busy):
            await two.send(FrameKind.PART, b"", b"1")
        await one.send(FrameKind.PART, b"", b"1")
        for _ in range(2):  # also when asked again
            with pytest.raises(Busy, match="month"):
                await two.receive(timedelta(seconds=1))
        receiver.set_remaining_bytes(float("inf"))
        assert bytes((await two.receive(timedelta(seconds=1))).body) == b"1"


@in_virtual_time
async def test_two_frames_at_once_on_one_stream_do_not_mix(tmp_path: Path) -> None:
    sender, receiver = Traffic(LoopClock()), Traffic(LoopClock())
    sender.limit(1e7, 0.0)
    async with pair(tmp_path / "a", sender, receiver) as (one, two):
        bodies = [bytes([number]) * 700_000 for number in range(3)]
        sends = asyncio.gather(*(one.send(FrameKind.PART, b"", body) for body in bodies))
        for body in bodies:
            assert bytes((await two.receive(timedelta(seconds=5))).body) == body
        await sends
