"""Frames on a byte stream, as a peer's bytes arrive: whole, in pieces, damaged, oversized, not at all."""

from __future__ import annotations

import asyncio
import struct
from datetime import timedelta

import pytest
from support.virtual_time import LoopClock, in_virtual_time

from atoll.core.clock import Clock
from atoll.core.errors import (
    AtollError,
    CheckpointCorrupt,
    ChildDied,
    DeadlineExceeded,
    FrameInvalid,
    HelloRequired,
    ModelTooLarge,
    PortInUse,
    RoundAbandoned,
    Unreachable,
    UsageError,
)
from atoll.core.frames import FrameKind, pack_prefix
from atoll.node.wire import streams
from atoll.node.wire.refusals import printable, refusal_header
from atoll.node.wire.streams import SocketStream
from atoll.node.wire.traffic import Traffic

SOON = timedelta(milliseconds=20)


class FakeWriter:
    """The part of an asyncio writer and its transport that `SocketStream` uses; keeps the written bytes."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False
        self.transport = self
        self.left_in_buffer = list[int]()  # what a slow kernel still holds at each look; empty: takes all at once

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == 0

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        if self.left_in_buffer:
            await asyncio.Event().wait()

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.left_in_buffer.pop(0) if self.left_in_buffer else 0

    def close(self) -> None:
        self.closed = True

    abort = close

    async def wait_closed(self) -> None:
        pass


def make_stream(
    known: bool = True, clock: Clock | None = None
) -> tuple[SocketStream, asyncio.StreamReader, FakeWriter, Traffic]:
    def require_member() -> None:
        if not known:
            raise HelloRequired("who is there")

    reader, writer, traffic = asyncio.StreamReader(), FakeWriter(), Traffic(clock or LoopClock())
    stream = SocketStream("peer", "/p/1", reader, writer, require_member=require_member, traffic=traffic)  # type: ignore[arg-type]
    return stream, reader, writer, traffic


def frame(kind: FrameKind, header: bytes, body: bytes = b"") -> bytes:
    return pack_prefix(kind, header, body) + header + body


@in_virtual_time
async def test_a_frame_in_pieces_survives_a_deadline_in_its_middle() -> None:
    stream, reader, _, traffic = make_stream()
    data = frame(FrameKind.PART, b"head", b"body" * 100)
    for start in range(0, len(data) - 50, 50):
        reader.feed_data(data[start : start + 50])
        with pytest.raises(DeadlineExceeded):
            await stream.receive(SOON)
    reader.feed_data(data[start + 50 :])
    received = await stream.receive(SOON)
    assert (received.header, bytes(received.body), traffic.received["/p/1"]) == (b"head", b"body" * 100, len(data))


@in_virtual_time
async def test_a_peer_that_announces_much_and_leaves_delays_no_other() -> None:
    for ends in ("close", "abort"):
        stream, reader, _, traffic = make_stream()
        traffic.limit(0.0, 1e6)
        reader.feed_data(pack_prefix(FrameKind.PART, b"head", bytes(8_000_000)))
        with pytest.raises(DeadlineExceeded):
            await stream.receive(SOON)
        if ends == "close":
            await stream.close()
        else:
            stream.abort()
        assert traffic.down.slot_start(100_000, small=False) - LoopClock().monotonic() < 0.1


@in_virtual_time
async def test_an_announced_length_of_2_to_the_40_allocates_nothing() -> None:
    stream, reader, _, _ = make_stream()
    reader.feed_data(struct.pack(">2sBBIII", b"AT", 1, 2, 2**32 - 1, 2**32 - 1, 0))
    with pytest.raises(FrameInvalid, match="the limit is"):
        await stream.receive(SOON)
    stream, reader, _, _ = make_stream()
    reader.feed_data((2**40).to_bytes(8, "big") + bytes(64))  # as hivemind writes its header
    with pytest.raises(FrameInvalid):
        await stream.receive(SOON)


@in_virtual_time
async def test_damage_and_early_ends_are_told_apart() -> None:
    stream, reader, _, _ = make_stream()
    damaged = bytearray(frame(FrameKind.PART, b"h", b"body"))
    damaged[-1] ^= 1
    reader.feed_data(bytes(damaged) + frame(FrameKind.PART, b"h")[:10])
    reader.feed_eof()
    with pytest.raises(FrameInvalid, match="damaged"):
        await stream.receive(SOON)
    with pytest.raises(Unreachable):
        await stream.receive(SOON)


@in_virtual_time
async def test_a_refusal_is_raised_as_its_class_and_ends_the_stream() -> None:
    stream, reader, writer, _ = make_stream()
    reader.feed_data(frame(FrameKind.REFUSAL, refusal_header(RoundAbandoned("too\x1b[31m late"))))
    with pytest.raises(RoundAbandoned, match=r"peer peer: too\?\[31m late"):
        await stream.receive(SOON)
    assert writer.closed
    assert len(printable("x" * 10_000)) == 500


@pytest.mark.parametrize("trouble", [ChildDied, CheckpointCorrupt, ModelTooLarge, UsageError, PortInUse])
@in_virtual_time
async def test_an_error_about_the_peers_own_machine_becomes_unreachable(trouble: type[AtollError]) -> None:
    """A node restarts its own trainer and gives up after too many failures; a peer's error must not cause that."""
    stream, reader, _, _ = make_stream()
    reader.feed_data(frame(FrameKind.REFUSAL, refusal_header(trouble("my trainer is gone"))))
    with pytest.raises(Unreachable, match="my trainer is gone"):
        await stream.receive(SOON)


@in_virtual_time
async def test_sent_bytes_are_counted_per_protocol_and_a_closed_stream_refuses() -> None:
    stream, _, writer, traffic = make_stream()
    await stream.send(FrameKind.PART, b"head", memoryview(b"b" * 100_000))
    assert bytes(writer.written) == frame(FrameKind.PART, b"head", b"b" * 100_000)
    assert traffic.sent == {"/p/1": 16 + 4 + 100_000} == {"/p/1": stream.bytes_sent}
    with pytest.raises(FrameInvalid):
        await stream.send(FrameKind.PART, b"", bytes(8 * 1024 * 1024 + 1))
    await stream.close()
    await stream.close()
    with pytest.raises(Unreachable):
        await stream.send(FrameKind.PART, b"")


@in_virtual_time
async def test_membership_is_checked_on_each_use() -> None:
    stream, reader, writer, _ = make_stream(known=False)
    reader.feed_data(frame(FrameKind.MESSAGE, b"x"))
    with pytest.raises(HelloRequired):
        await stream.receive(SOON)
    with pytest.raises(HelloRequired):
        await stream.send(FrameKind.MESSAGE, b"x")
    assert not writer.written


@in_virtual_time
async def test_a_send_waits_for_a_slow_peer_and_fails_for_a_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STALL_TIMEOUT", timedelta(milliseconds=1))
    stream, _, writer, _ = make_stream()
    writer.left_in_buffer = [900, 600, 300]  # moves each time, then drains
    await stream.send(FrameKind.PART, b"")
    writer.left_in_buffer = [900, 600, 600, 600]
    with pytest.raises(Unreachable, match="took no data"):
        await stream.send(FrameKind.PART, b"")
    assert writer.closed
