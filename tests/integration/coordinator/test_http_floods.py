"""Connections to the status page that ask for nothing: they end, and take few descriptors meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from integration.coordinator.lab import Coordinator, coordinator, http_client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from support.eventually import eventually

from atoll.coordinator import addresses
from atoll.coordinator.web import http_server
from atoll.core.tokens import split_endpoint

HALF = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
MANY = 3 * http_server.MAX_CONNECTIONS


class Clients:
    """Clients that send half of a request, and come back when they are cut off."""

    def __init__(self, home: Coordinator) -> None:
        self._endpoint = split_endpoint(home.endpoints.http)
        self.begun = self.cut_off = 0

    @asynccontextmanager
    async def hold(self, count: int) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._hold()) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(*self._endpoint)
                self.begun += 1
                try:
                    writer.write(HALF)
                    await reader.read()
                finally:
                    self.cut_off += 1
                    writer.transport.abort()
            await asyncio.sleep(0.1)


async def test_half_sent_requests_leave_room_for_others(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home, http_client(home) as web:
        await home.create_run()
        clients = Clients(home)
        async with clients.hold(MANY):
            surplus = MANY - http_server.MAX_CONNECTIONS
            await eventually(lambda: clients.begun >= MANY and clients.cut_off >= surplus)
            for _ in range(5):
                assert (await web.get("/livez", headers={"connection": "close"}, timeout=60)).text == "ok\n"
            assert (await home.node("ann")).enrolled.run_id == "reef"


@pytest.mark.parametrize("first", [b"", HALF, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_no_connection_waits_for_a_request_for_long(
    tmp_path: Path, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 1.0)
    async with coordinator(tmp_path / "c") as home:
        reader, writer = await asyncio.open_connection(*split_endpoint(home.endpoints.http))
        writer.write(first)

        async def trickle() -> None:
            with suppress(OSError):
                while True:
                    await asyncio.sleep(0.05)
                    writer.write(b"G" if first.endswith(b"\r\n\r\n") else b"x")
                    await writer.drain()

        trickling = asyncio.create_task(trickle())
        reading = asyncio.create_task(reader.read())
        await eventually(reading.done)
        trickling.cancel()
        writer.transport.abort()
        await asyncio.gather(trickling, reading, return_exceptions=True)


@pytest.mark.parametrize("pieces", [1, 32])
async def test_an_answer_that_nobody_reads_ends(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 1.0)

    async def answer(_request: Request) -> StreamingResponse:
        body = b"x" * ((32 << 20) // pieces)  # all of it is more than sockets buffer
        return StreamingResponse(iter([body] * pieces))

    listener = addresses.bind("127.0.0.1", 0, "--http-port")
    server = http_server.HttpServer(Starlette(routes=[Route("/", answer)]), listener)
    await server.start()
    with socket.create_connection(listener.getsockname()) as client:
        client.setblocking(False)
        client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connections = server._server.server_state.connections
        await eventually(lambda: connections)
        await eventually(lambda: not connections)
    await server.stop()
