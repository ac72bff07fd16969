"""uvicorn inside our event loop, on a socket that we bound, without signal handlers of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

_START_SECONDS = 10.0


class _EmbeddedServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the program handles signals."""
        yield


class HttpServer:
    """Serves an application until `stop`."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _EmbeddedServer(settings)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the server; it accepts requests when this returns."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        async with asyncio.timeout(_START_SECONDS):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Finish requests in progress, then close."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
        self._listener.close()
