"""DirectReader: bytes are read in order, in any pieces, also after cancelled reads."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.direct.reader import (
    PIECE_BYTES,
    SMALL_BUFFER_BYTES,
    WAIT_FRACTION_OF_RECEIVED,
    DirectReader,
    bytes_to_wait_for,
)

LARGE = SMALL_BUFFER_BYTES + 100_000


class FakeTransport(asyncio.ReadTransport):
    """A transport that records the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.asked: list[tuple[int, int, int]] = []  # of the socket

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.asked.append((level, option, value))


def connected() -> tuple[DirectReader, FakeTransport]:
    incoming, transport = DirectReader(), FakeTransport()
    incoming.set_transport(transport)
    return incoming, transport


def feed(incoming: DirectReader, data: bytes) -> int:
    """Feed bytes as TLS does, into the available buffer. Return how many fitted."""
    buffer_for = incoming.buffer_for(len(data))
    count = min(len(buffer_for), len(data))
    buffer_for[:count] = data[:count]
    incoming.on_received(count)
    return count


async def feed_all(
    incoming: DirectReader, transport: FakeTransport, data: bytes, pieces: list[int], vain: tuple[int, ...] = (0,)
) -> None:
    """`vain`: size of the buffer that TLS requests first, for an incomplete record, without delivering bytes."""
    position = turn = 0
    while position < len(data):
        if transport.paused:
            await asyncio.sleep(0)
            continue
        size = pieces[turn % len(pieces)]
        if in_vain := vain[turn % len(vain)]:
            incoming.buffer_for(in_vain)
        turn += 1
        position += feed(incoming, data[position : position + size])
        if turn % 3 == 0:
            await asyncio.sleep(0)


def numbered(count: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(count))


@settings(max_examples=40, deadline=None)
@given(
    reads=st.lists(
        st.sampled_from([1, 16, 5000, SMALL_BUFFER_BYTES, SMALL_BUFFER_BYTES + 1, LARGE]), min_size=1, max_size=8
    ),
    pieces=st.lists(st.integers(1, 40_000), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 5000),
    vain=st.lists(st.sampled_from([0, 12_000, 100_000]), min_size=1, max_size=4),
)
def test_reads_of_any_size_give_what_was_sent_in_order(reads: list[int], pieces: list[int], vain: list[int]):
    sent = numbered(sum(reads))

    async def read_all() -> list[bytes]:
        incoming, transport = connected()
        feeding = asyncio.create_task(feed_all(incoming, transport, sent, pieces, tuple(vain)))
        got = [bytes(await incoming.readexactly(count)) for count in reads]
        await feeding
        return got

    got = asyncio.run(read_all())
    assert [len(piece) for piece in got] == reads
    assert b"".join(got) == sent


async def test_an_unused_buffer_does_not_overwrite_later_bytes():
    """TLS had 12,000 bytes of a last record and requested an extra buffer; the rest of the record fits the read."""
    incoming, _ = connected()
    sent = numbered(LARGE)
    reading = asyncio.create_task(incoming.readexactly(LARGE))
    await asyncio.sleep(0)
    feed(incoming, sent[:-25_000])
    incoming.buffer_for(12_000)
    feed(incoming, sent[-25_000:-20_000])
    feed(incoming, sent[-20_000:])
    assert await reading == sent


@pytest.mark.parametrize("count", [1000, LARGE])
async def test_a_cancelled_read_loses_no_bytes(count: int):
    incoming, transport = connected()
    sent = numbered(count)
    reading = asyncio.create_task(incoming.readexactly(count))
    await asyncio.sleep(0)
    feed(incoming, sent[:600])
    reading.cancel()
    await asyncio.wait([reading])
    await feed_all(incoming, transport, sent[600:], [30_000])
    assert await incoming.readexactly(count) == sent


async def test_a_cancelled_large_read_cannot_be_continued_with_another_size():
    incoming, _ = connected()
    reading = asyncio.create_task(incoming.readexactly(LARGE))
    await asyncio.sleep(0)
    feed(incoming, numbered(600))
    reading.cancel()
    await asyncio.wait([reading])
    with pytest.raises(RuntimeError):
        await incoming.readexactly(16)


async def test_a_peer_that_is_not_read_has_to_wait():
    incoming, transport = connected()
    sent = numbered(SMALL_BUFFER_BYTES)
    assert feed(incoming, sent) == SMALL_BUFFER_BYTES
    assert transport.paused
    assert await incoming.readexactly(16) == sent[:16]
    assert not transport.paused
    assert incoming.buffer_for(1)


@pytest.mark.parametrize("count", [16, LARGE])
async def test_the_end_ends_a_read(count: int):
    incoming, _ = connected()
    reading = asyncio.create_task(incoming.readexactly(count))
    await asyncio.sleep(0)
    feed(incoming, b"abc")
    incoming.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await reading


async def test_a_broken_connection_ends_a_read():
    incoming, _ = connected()
    reading = asyncio.create_task(incoming.readexactly(16))
    await asyncio.sleep(0)
    incoming.set_exception(ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        await reading


@given(missing=st.integers(0, 2**23), before=st.integers(0, 2**30))
def test_a_read_never_waits_for_more_bytes_than_are_to_come(missing: int, before: int):
    least = bytes_to_wait_for(missing, before)
    assert 1 <= least <= PIECE_BYTES
    assert least == 1 or least < missing - 2**14  # TLS may hold most of a record already
    assert least == 1 or least <= before / WAIT_FRACTION_OF_RECEIVED


async def test_the_kernel_gathers_in_the_middle_of_a_large_read_and_never_at_its_end(monkeypatch):
    monkeypatch.setattr("atoll.node.direct.reader._HAS_RECEIVE_LOW_WATER", True)
    incoming, transport = connected()
    for _ in range(12):
        reading = asyncio.create_task(incoming.readexactly(4 * LARGE))
        await asyncio.sleep(0)
        await feed_all(incoming, transport, bytes(4 * LARGE), [10_000])
        await reading
    assert transport.asked[-1] == (socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    assert PIECE_BYTES in [value for _, _, value in transport.asked]
