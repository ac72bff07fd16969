"""Stripes: bytes stay in order for any sizes of reads and writes, and the assembler joins the right stripes."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.byte_stream import RecordingWriter, reader_of
from support.virtual_time import LoopClock, in_virtual_time

from atoll.core.errors import DeadlineExceeded, HelloRequired, PeerMisbehaved, Unreachable
from atoll.core.frames import Frame, FrameKind
from atoll.node.swarm import stripes
from atoll.node.swarm.stripes import (
    STRIPE_UNIT_BYTES,
    STRIPES,
    StripeAssembler,
    StripedReader,
    StripedWriter,
    join_stripes,
)
from atoll.node.wire import streams
from atoll.node.wire.gate import Gate
from atoll.node.wire.streams import SocketStream
from atoll.node.wire.traffic import Traffic
from atoll.v1 import dataplane_pb2 as dp

AVERAGE, STATE = "/atoll/average/1", "/atoll/state/1"
NAME = bytes(range(16))
SOON = timedelta(seconds=5)
BODY = bytes(5 * STRIPE_UNIT_BYTES + 11)

Joining = asyncio.Task[tuple[str, stripes.StripedReaderWriter] | None]

cuts = st.lists(st.integers(0, 3 * STRIPE_UNIT_BYTES), min_size=1, max_size=12)


def dealt(count: int, pieces: list[bytes]) -> list[bytes]:
    """Return the bytes that leave on each of `count` stripes."""
    writers = [RecordingWriter() for _ in range(count)]
    striped = StripedWriter(writers)
    for piece in pieces:
        striped.write(piece)
    return [bytes(writer.written) for writer in writers]


@given(count=st.integers(1, 5), sizes=cuts, asked=cuts, seed=st.binary(min_size=1, max_size=9))
@in_virtual_time
async def test_bytes_arrive_in_order_for_any_sizes_of_writes_and_reads(
    count: int, sizes: list[int], asked: list[int], seed: bytes
) -> None:
    total = sum(sizes)
    data = (seed * (total // len(seed) + 1))[:total]
    pieces = [data[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    streams = dealt(count, pieces)
    assert max(map(len, streams)) - min(map(len, streams)) <= STRIPE_UNIT_BYTES
    reader = StripedReader([reader_of(stream) for stream in streams])
    found = b""
    for size in asked:
        if len(found) + size > total:
            break
        found += await reader.readexactly(size)
    found += await reader.readexactly(total - len(found))
    assert found == data
    with pytest.raises(asyncio.IncompleteReadError):
        await reader.readexactly(1)


@in_virtual_time
async def test_a_cancelled_read_continues_where_it_stopped() -> None:
    data = bytes(range(256)) * (3 * STRIPE_UNIT_BYTES // 256)
    readers = [asyncio.StreamReader(), asyncio.StreamReader()]
    reader = StripedReader(readers)
    first, second = dealt(2, [data])
    readers[0].feed_data(first[:STRIPE_UNIT_BYTES])
    for late in (second[:7], second[7:]):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(len(data)), 0.01)
        readers[1].feed_data(late)
    with pytest.raises(RuntimeError, match="with that size again"):
        await reader.readexactly(5)
    readers[0].feed_data(first[STRIPE_UNIT_BYTES:])
    assert await reader.readexactly(len(data)) == data


@in_virtual_time
async def test_frames_pass_and_the_end_of_one_stripe_ends_the_stream() -> None:
    writers = [RecordingWriter() for _ in range(STRIPES)]
    sender = stream_on(StripedReader([]), StripedWriter(writers))
    await sender.send(FrameKind.PART, b"header", BODY)
    readers = [reader_of(bytes(writer.written), ends=False) for writer in writers]
    receiver = stream_on(*join_stripes([(reader, RecordingWriter()) for reader in readers]))
    frame = await receiver.receive(SOON)
    assert (frame.kind, frame.header, bytes(frame.body)) == (FrameKind.PART, b"header", BODY)
    writers[2].close()
    with pytest.raises(Exception, match="ended the stream"):
        await sender.send(FrameKind.PART, b"header", BODY)
    await sender.close()
    assert all(writer.closed for writer in writers)


def stream_on(reader: Any, writer: Any) -> SocketStream:
    return SocketStream("peer", AVERAGE, reader, writer, require_member=lambda: None, traffic=Traffic(LoopClock()))


@in_virtual_time
async def test_a_send_returns_when_every_stripe_has_taken_its_bytes() -> None:
    """Until then the body must not be overwritten: since Python 3.12, transports keep it and not a copy."""
    writers = [SlowWriter() for _ in range(STRIPES)]
    sending = asyncio.create_task(stream_on(StripedReader([]), StripedWriter(writers)).send(FrameKind.PART, b"", BODY))
    for writer in writers:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not sending.done()
        writer.taken.set()
    await asyncio.wait_for(sending, SOON.total_seconds())


@in_virtual_time
async def test_a_sender_waits_as_long_as_any_stripe_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STALL_TIMEOUT", timedelta(seconds=0.05))
    writers = [SlowWriter() for _ in range(STRIPES)]
    stream = stream_on(StripedReader([]), StripedWriter(writers))
    sending = asyncio.create_task(stream.send(FrameKind.PART, b"", BODY))
    for _ in range(4):
        await asyncio.sleep(0.04)
        writers[-1].left -= 1
        assert not sending.done()
    with pytest.raises(Unreachable, match="took no data"):
        await sending
    assert all(writer.closed for writer in writers)


class SlowWriter(RecordingWriter):
    """A transport that holds data until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = asyncio.Event()
        self.left = 1000

    async def drain(self) -> None:
        await self.taken.wait()

    def get_write_buffer_size(self) -> int:
        return self.left


@pytest.mark.parametrize("how", ["ends", "breaks"])
@pytest.mark.parametrize(
    ("waits_for", "seconds"), [(16, 0.1), (2 * STRIPE_UNIT_BYTES, 0.1), (3 * STRIPE_UNIT_BYTES, 1e6)]
)
@pytest.mark.parametrize("asks_again", [0.01, 1e6])
@in_virtual_time
async def test_a_waiting_read_notices_the_end_of_another_stripe(
    monkeypatch: pytest.MonkeyPatch, how: str, waits_for: int, seconds: float, asks_again: float
) -> None:
    """At once if the read needs its bytes, else after the grace, also if reads are cancelled in between."""
    monkeypatch.setattr(stripes, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(stripes, "_END_GRACE_SECONDS", seconds)
    readers = [reader_of(b"", ends=False) for _ in range(STRIPES)]
    clock = asyncio.get_running_loop().time
    reader, began = StripedReader(readers), clock()
    if how == "ends":
        readers[2].feed_eof()
    else:
        readers[2].set_exception(ConnectionResetError())
    with pytest.raises(asyncio.IncompleteReadError):
        await asyncio.wait_for(ask(reader, waits_for, asks_again), SOON.total_seconds())
    assert seconds > 1 or clock() - began >= seconds


async def ask(reader: StripedReader, count: int, again: float) -> None:
    """Rounds cancel reads from time to time to check whether a peer is silent."""
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.readexactly(count), again)
            return


@in_virtual_time
async def test_a_read_waits_for_slow_bytes_after_the_end_of_another_stripe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stripes, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(stripes, "_END_GRACE_SECONDS", 1.0)
    readers = [reader_of(b"", ends=False) for _ in range(STRIPES)]
    readers[1].feed_eof()
    reading = asyncio.create_task(StripedReader(readers).readexactly(15))
    for number in range(15):  # longer than that in all
        await asyncio.sleep(0.1)
        readers[0].feed_data(bytes([number]))
    assert await asyncio.wait_for(reading, SOON.total_seconds()) == bytes(range(15))


@in_virtual_time
async def test_bytes_that_arrive_after_the_end_of_another_stripe_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the peer's last frame, the end of one stripe may overtake bytes on another."""
    monkeypatch.setattr(stripes, "_POLL_SECONDS", 0.01)
    data = bytes(range(256)) * (STRIPE_UNIT_BYTES * 5 // 256)
    streams = dealt(STRIPES, [data])
    readers = [reader_of(stream, ends=index > 0) for index, stream in enumerate([b"", *streams[1:]])]
    reading = asyncio.create_task(StripedReader(readers).readexactly(len(data)))
    await asyncio.sleep(0.05)
    readers[0].feed_data(streams[0][:STRIPE_UNIT_BYTES])
    await asyncio.sleep(0.05)
    readers[0].feed_data(streams[0][STRIPE_UNIT_BYTES:])
    assert await asyncio.wait_for(reading, SOON.total_seconds()) == data


@in_virtual_time
async def test_memory_grows_with_received_bytes_and_not_with_announced_ones() -> None:
    announced = 512 * 1024 * 1024
    readers = [reader_of(bytes(100), ends=False) for _ in range(STRIPES)]
    reader = StripedReader(readers)
    tracemalloc.start()
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(announced), 0.05)
        assert tracemalloc.get_traced_memory()[1] < announced / 100
    finally:
        tracemalloc.stop()


# --- who belongs together --------------------------------------------------------------------------------


class FakeGate(Gate):
    """A gate that admits every peer and records tracked streams."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def track_stream(self, peer_id: str, stream: Any) -> None:
        self.held.append(stream)

    def untrack_stream(self, peer_id: str, stream: Any) -> None:
        self.held.remove(stream)


def told(index: int, *, name: bytes = NAME, protocol: str = AVERAGE) -> Frame:
    stripe = dp.Stripe(conversation=name, index=index, protocol=protocol)
    return Frame(FrameKind.MESSAGE, stripe.SerializeToString())


def ends(marked: bytes = b"") -> Any:
    return reader_of(marked, ends=False), RecordingWriter()


def coming(assembler: StripeAssembler, index: int, marked: bytes = b"", *, peer: str = "ann", **said: Any) -> Joining:
    return asyncio.create_task(assembler.add(peer, told(index, **said), ends(marked)))


@given(order=st.permutations(range(STRIPES)))
@in_virtual_time
async def test_the_first_stripe_gets_all_stripes_in_order(order: list[int]) -> None:
    assembler = StripeAssembler(FakeGate(), {AVERAGE})
    marked = [bytes([index]) * STRIPE_UNIT_BYTES for index in range(STRIPES)]
    other = coming(assembler, order[0], peer="bob")  # another peer may choose the same name
    tasks = []
    for index in order:
        tasks.append(coming(assembler, index, marked[index]))
        await asyncio.sleep(0)
        assert len(tasks) == STRIPES or not any(task.done() for task in tasks)
    first, *rest = await asyncio.gather(*tasks)
    assert rest == [None] * (STRIPES - 1)
    assert first is not None
    protocol, (reader, _) = first
    assert protocol == AVERAGE
    assert await reader.readexactly(STRIPES * STRIPE_UNIT_BYTES) == b"".join(marked)
    assert not other.done()
    other.cancel()


@pytest.mark.parametrize(
    "frame",
    [
        told(0),  # that one is here
        told(STRIPES),
        told(1, protocol=STATE),
        told(1, protocol="/atoll/round/1"),  # not one of those that this is for
        told(1, name=b"short"),
        Frame(FrameKind.MESSAGE, b"\xff"),
        Frame(FrameKind.PART, told(1).header),
        Frame(FrameKind.MESSAGE, told(1).header, b"body"),
    ],
)
@in_virtual_time
async def test_a_stripe_that_does_not_fit_is_refused_and_the_others_continue(frame: Frame) -> None:
    assembler = StripeAssembler(FakeGate(), {AVERAGE, STATE})
    waiting = coming(assembler, 0)
    await asyncio.sleep(0)
    with pytest.raises(PeerMisbehaved):
        await assembler.add("ann", frame, ends())
    await asyncio.gather(*(coming(assembler, index) for index in range(1, STRIPES)))
    assert await waiting is not None


@in_virtual_time
async def test_incomplete_streams_of_a_peer_are_bounded_and_all_their_stripes_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes the stripe that the dialler reads, in any order of arrival."""
    monkeypatch.setattr(stripes, "ASSEMBLE_TIMEOUT", timedelta(seconds=0.05))
    monkeypatch.setattr(stripes, "_POLL_SECONDS", 0.02)
    assembler = StripeAssembler(FakeGate(), {AVERAGE})
    names = [bytes([number]) * 16 for number in range(stripes.MAX_PARTIAL_PER_PEER)]
    waiting = [coming(assembler, index, name=name) for name in names for index in (2, 0)]
    await asyncio.sleep(0)
    with pytest.raises(PeerMisbehaved, match="at most 18 streams"):
        await assembler.add("ann", told(0), ends())
    for task in waiting:
        with pytest.raises(DeadlineExceeded, match=f"2 of {STRIPES} stripes arrived"):
            await task
    late = coming(assembler, 0)  # there is room again
    await asyncio.sleep(0)
    assert not late.done()
    late.cancel()


@pytest.mark.parametrize("how", ["ends", "breaks"])
@in_virtual_time
async def test_a_peer_that_closes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(stripes, "_POLL_SECONDS", 0.02)
    assembler = StripeAssembler(FakeGate(), {AVERAGE})
    waiting, second = coming(assembler, 0), ends()
    other = asyncio.create_task(assembler.add("ann", told(1), second))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    if how == "ends":
        second[0].feed_eof()
    else:
        second[0].set_exception(ConnectionResetError())
    for task in (waiting, other):
        with pytest.raises(Unreachable, match="closed a stripe"):
            await asyncio.wait_for(task, SOON.total_seconds())


@in_virtual_time
async def test_an_evicted_or_cancelled_stream_leaves_no_state() -> None:
    gate = FakeGate()
    assembler = StripeAssembler(gate, {AVERAGE})
    for end in ("evicted", "cancelled"):
        waiting, other = coming(assembler, 0), coming(assembler, 1)
        await asyncio.sleep(0)
        (held,) = gate.held
        if end == "evicted":
            held.abort()
        else:
            waiting.cancel()
        with pytest.raises(HelloRequired if end == "evicted" else asyncio.CancelledError):
            await waiting
        with pytest.raises(HelloRequired if end == "evicted" else Unreachable):
            await other
        assert not gate.held


@in_virtual_time
async def test_if_one_stripe_cannot_be_opened_the_others_are_closed() -> None:
    opened: list[RecordingWriter] = []

    async def open_one() -> Any:
        if len(opened) == STRIPES - 1:
            raise Unreachable("nobody is there")
        reader, writer = ends()
        opened.append(writer)
        return stream_on(reader, writer), (reader, writer)

    with pytest.raises(Unreachable):
        await stripes.open_stripes(open_one, AVERAGE)
    assert len(opened) == STRIPES - 1
    assert all(writer.closed for writer in opened)
