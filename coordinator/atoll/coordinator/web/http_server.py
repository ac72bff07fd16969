"""uvicorn inside the coordinator's event loop, on an open socket, without its own signal handlers.

Anybody who reaches the port may connect, and each connection takes a descriptor of the whole coordinator. So their
number is small, and an incomplete request and an unread answer have deadlines. When there are too many, the oldest
connection that waits for a request is closed. So a probe of `/livez` is answered even if others use all connections.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
REQUEST_SECONDS = 10.0  # from the connection, or the last answer, to the end of a request's header
ANSWER_SECONDS = 30.0  # from then until the client has read the answer
MAX_HEADER_BYTES = 16 << 10
# before the event loop reads again: a waiting request is answered before MAX_CONNECTIONS more come
_ACCEPTED_AT_ONCE = 32
_BACKLOG = 512
_START_SECONDS = 10.0


class _BoundedProtocol(H11Protocol):
    """One connection, with a deadline for each request and each answer."""

    _deadline: asyncio.TimerHandle | None = None
    _is_answering = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline(REQUEST_SECONDS)
        if len(self.connections) > MAX_CONNECTIONS:
            _end_one(self.connections)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    @property
    def oldest_first(self) -> tuple[bool, float]:
        """Sort key: connections that wait for a request first, and the earliest deadline first."""
        return self._is_answering, self._deadline.when() if self._deadline is not None else 0.0

    def end(self) -> None:
        """End the connection now."""
        self.connections.discard(self)
        self.transport.abort()

    def _note_phase(self) -> None:
        """Set the deadline if an answer has begun or ended. More bytes of one request do not extend its deadline."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering is not self._is_answering:
            self._is_answering = is_answering
            self._set_deadline(ANSWER_SECONDS if is_answering else REQUEST_SECONDS)

    def _set_deadline(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.end)


def _end_one(connections: Iterable[object]) -> None:
    ours = [connection for connection in connections if isinstance(connection, _BoundedProtocol)]
    min(ours, key=lambda connection: connection.oldest_first).end()


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
            http=_BoundedProtocol,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            backlog=_ACCEPTED_AT_ONCE,
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
        self._listener.listen(_BACKLOG)

    async def stop(self) -> None:
        """Finish requests in progress, then close."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
        self._listener.close()
