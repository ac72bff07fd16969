"""The local socket: how `atoll status`, `pause`, `resume`, `finish` and `leave` reach the daemon.

One JSON object a line each way over a Unix socket of mode 0600 in the data directory. Only the owner of
that directory can connect, so there is no further authentication. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, Unreachable, UsageError, by_reason

SOCKET_NAME = "atoll.sock"
_TIMEOUT = timedelta(seconds=5)
_LONGEST_PATH = 100  # of sun_path's 108
_MAX_LINE = 1 << 20

Answer = dict[str, Any]
Command = Callable[[dict[str, Any]], Awaitable[Answer]]


class LocalApi:
    """Serves named commands on the socket."""

    def __init__(self, data_dir: Path, commands: dict[str, Command]) -> None:
        self._data_dir = data_dir
        self._commands = commands
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. A stale socket of a dead daemon is replaced (the data directory's lock is ours)."""
        with _socket_path(self._data_dir) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            mask = os.umask(0o177)
            try:
                self._server = await asyncio.start_unix_server(self._serve, path, limit=_MAX_LINE)
            finally:
                os.umask(mask)

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(FileNotFoundError):
            (self._data_dir / SOCKET_NAME).unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT.total_seconds()):
                request = json.loads(await reader.readline())
            answer = await self._answer(request)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ValueError, ConnectionError):
            return
        finally:
            writer.close()

    async def _answer(self, request: Any) -> Answer:
        command = self._commands.get(request.get("command", "")) if isinstance(request, dict) else None
        try:
            if command is None:
                raise UsageError("the daemon does not know that command")
            return {"ok": await command(request)}
        except AtollError as error:
            return {"error": {"reason": error.reason, "message": str(error), "remedy": error.remedy}}


def call(data_dir: Path, command: str, timeout: timedelta = _TIMEOUT, **arguments: object) -> Answer:
    """Ask the daemon of `data_dir`. Raises `Unreachable` when none runs, and whatever it answers."""
    try:
        with _socket_path(data_dir) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout.total_seconds())
            connection.connect(path)
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            line = connection.makefile("rb").readline(_MAX_LINE)
    except OSError as error:
        raise Unreachable(
            f"no atoll daemon runs on {data_dir}", "start one with `atoll join`, or name its directory with --data-dir"
        ) from error
    if not line:
        raise Unreachable(f"the daemon on {data_dir} hung up")
    answer: Answer = json.loads(line)
    if "error" in answer:
        problem = answer["error"]
        raise by_reason(problem["reason"])(problem["message"], problem["remedy"])
    result: Answer = answer["ok"]
    return result


@contextlib.contextmanager
def _socket_path(data_dir: Path) -> Iterator[str]:
    """The socket's path, by way of /proc when it is longer than the kernel allows."""
    path = str(data_dir / SOCKET_NAME)
    if len(path) <= _LONGEST_PATH:
        yield path
        return
    descriptor = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
