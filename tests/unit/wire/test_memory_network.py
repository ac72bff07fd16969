"""The in-process network keeps the promises of `transport.Network`, and its faults do what they say."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from support.memory_network import FrameInTransit, MemoryHub
from support.virtual_time import in_virtual_time

from atoll.core.errors import DeadlineExceeded, FrameInvalid, InvalidRequest, Unreachable
from atoll.core.frames import Frame, FrameKind
from atoll.node.wire.transport import Network, Stream

SECOND = timedelta(seconds=1)
SOON = timedelta(milliseconds=20)


async def echo(stream: Stream) -> None:
    while True:
        frame = await stream.receive(SECOND)
        await stream.send(FrameKind.BODY, b"", frame.body)


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@in_virtual_time
async def test_frames_arrive_in_order_and_bytes_are_counted(hub: MemoryHub) -> None:
    a: Network = hub.join("a")
    hub.join("b").handle("/echo/1", echo)
    stream = await a.open("b", "/echo/1", SECOND)
    for body in (b"one", b"two"):
        await stream.send(FrameKind.PART, b"h", body)
    assert [bytes((await stream.receive(SECOND)).body) for _ in range(2)] == [b"one", b"two"]
    assert (stream.peer_id, stream.bytes_sent) == ("b", 2 * 20)


@in_virtual_time
async def test_bytes_sent_before_close_are_still_received(hub: MemoryHub) -> None:
    async def reply_and_go(stream: Stream) -> None:
        await stream.send(FrameKind.BODY, b"", b"bye")

    a = hub.join("a")
    hub.join("b").handle("/bye/1", reply_and_go)
    stream = await a.open("b", "/bye/1", SECOND)
    assert (await stream.receive(SECOND)).body == b"bye"
    with pytest.raises(Unreachable):
        await stream.receive(SECOND)


@in_virtual_time
async def test_handler_errors_come_back_as_their_class_and_crashes_as_internal(hub: MemoryHub) -> None:
    async def refuse(stream: Stream) -> None:
        raise InvalidRequest("no such round")

    async def crash(stream: Stream) -> None:
        raise ZeroDivisionError

    a, b = hub.join("a"), hub.join("b")
    b.handle("/refuse/1", refuse)
    b.handle("/crash/1", crash)
    with pytest.raises(InvalidRequest, match="no such round"):
        await (await a.open("b", "/refuse/1", SECOND)).receive(SECOND)
    with pytest.raises(Exception, match="internal error"):
        await (await a.open("b", "/crash/1", SECOND)).receive(SECOND)
    assert b.crashes == 1


@in_virtual_time
async def test_a_silent_peer_is_a_deadline_and_an_unknown_one_is_unreachable(hub: MemoryHub) -> None:
    a = hub.join("a")
    hub.join("b").handle("/echo/1", echo)
    with pytest.raises(DeadlineExceeded):
        await (await a.open("b", "/echo/1", SECOND)).receive(SOON)
    for peer, protocol in (("c", "/echo/1"), ("b", "/none/1")):
        with pytest.raises(Unreachable):
            await a.open(peer, protocol, SECOND)


@in_virtual_time
async def test_an_evicted_peer_ends_even_the_stream_of_a_blocked_sender(hub: MemoryHub) -> None:
    async def never_read(stream: Stream) -> None:
        await asyncio.Event().wait()

    a = hub.join("a")
    hub.join("b").handle("/sink/1", never_read)
    stream = await a.open("b", "/sink/1", SECOND)

    async def flood() -> None:
        while True:
            await stream.send(FrameKind.PART, b"", b"x")

    sender = asyncio.create_task(flood())
    await asyncio.sleep(0)
    await hub.cut("b")
    with pytest.raises(Unreachable):
        await sender


@in_virtual_time
async def test_faults_drop_replace_and_damage() -> None:
    async def fault(passage: FrameInTransit) -> Frame | FrameInvalid | None:
        verdicts = {b"drop": None, b"lie": Frame(FrameKind.PART, b"", b"!"), b"rot": FrameInvalid("damaged")}
        return verdicts.get(bytes(passage.frame.body), passage.frame)

    async def collect(stream: Stream) -> None:
        while True:
            frame = await stream.receive(SECOND)
            seen.append(bytes(frame.body))

    seen: list[bytes] = []
    hub = MemoryHub(fault)
    a = hub.join("a")
    hub.join("b").handle("/sink/1", collect)
    stream = await a.open("b", "/sink/1", SECOND)
    for body in (b"drop", b"keep", b"lie", b"rot"):
        await stream.send(FrameKind.PART, b"", body)
    with pytest.raises(FrameInvalid, match="damaged"):
        await stream.receive(SECOND)
    assert seen == [b"keep", b"!"]
    await hub.close()
