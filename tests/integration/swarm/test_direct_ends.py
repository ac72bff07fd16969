"""A slow reader gets all bytes that the peer sent before it closed."""

from __future__ import annotations

import asyncio
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
from support.direct_pair import TALK, direct_pair, shout

from atoll.core.frames import FrameKind
from atoll.node.direct import tls, tls_streams

TIMEOUT = timedelta(seconds=60)
SMALL = [16, 60_000] * 4
MANY = [16, 300] * 400
LARGE = [16, 300_000, 16]
BETWEEN = [16, 70_000] * 3 + [16]


async def both(folder: Path) -> tuple[tls_streams.TlsStreams, tls_streams.TlsStreams]:
    """The dialler's end and the listener's."""
    context, _ = tls.listening_context(folder, time.time())
    loop, listening = asyncio.get_running_loop(), socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)

    async def accepted() -> tls_streams.TlsStreams:
        sock, _ = await loop.sock_accept(listening)
        return await tls_streams.accept(sock, context, TIMEOUT)

    with listening:
        ours, theirs = await asyncio.gather(
            tls_streams.dial(listening.getsockname(), tls.dialling_context(), TIMEOUT), accepted()
        )
    return ours, theirs


@pytest.mark.parametrize("late", [True, False], ids=["late", "waiting"])
@pytest.mark.parametrize("sizes", [SMALL, MANY, LARGE, BETWEEN], ids=["small", "many", "large", "between"])
async def test_all_bytes_that_were_sent_before_the_end_are_read(tmp_path: Path, sizes: list[int], late: bool) -> None:
    (reader, writer), (_, theirs) = await both(tmp_path)
    sent = [bytes([number % 251]) * size for number, size in enumerate(sizes)]

    async def read() -> list[bytes]:
        return [bytes(await reader.readexactly(size)) for size in sizes]

    reading = None if late else asyncio.create_task(read())
    theirs.write(b"".join(sent))
    async with asyncio.timeout(TIMEOUT.total_seconds()):
        while theirs.transport.get_write_buffer_size():
            await asyncio.sleep(0.01)
        theirs.transport.abort()
        while late and not writer.is_closing() and not reader._is_paused:
            await asyncio.sleep(0.01)
        assert await (reading or read()) == sent
        with pytest.raises((asyncio.IncompleteReadError, OSError)):
            await reader.readexactly(1)
    writer.transport.abort()


@pytest.mark.parametrize("size", [16, 300_000])
async def test_a_read_on_a_connection_that_was_lost_meanwhile_says_so(tmp_path: Path, size: int) -> None:
    (reader, writer), (_, theirs) = await both(tmp_path)
    theirs.write(bytes(90))
    assert await reader.readexactly(84) == bytes(84)
    theirs.transport.abort()
    async with asyncio.timeout(TIMEOUT.total_seconds()):
        while not reader.at_eof() and writer.get_extra_info("socket") is not None and reader.exception() is None:
            await asyncio.sleep(0.01)
            if writer.is_closing():
                break
        await asyncio.sleep(0.05)
        with pytest.raises((asyncio.IncompleteReadError, OSError)):
            await reader.readexactly(size)
    writer.transport.abort()


async def test_bytes_on_a_direct_connection_are_counted_as_they_arrive(tmp_path: Path) -> None:
    """Bytes count when they arrive, not when a frame is complete: several frames that end together would look fast."""
    body = bytes(4 << 20)
    async with direct_pair(tmp_path) as pair:
        pieces: list[int] = []
        pair.a.traffic.count_arrived = pieces.append  # type: ignore[method-assign]
        pair.b.acceptor.handle(TALK, shout)
        stream = await pair.a.talk(pair.b)
        await stream.send(FrameKind.MESSAGE, b"", body)
        frame = await stream.receive(TIMEOUT)
        await stream.close()
    assert bytes(frame.body) == body
    assert sum(pieces) >= len(body)
    assert max(pieces) < len(body) / 8
