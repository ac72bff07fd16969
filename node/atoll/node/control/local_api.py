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
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, UsageError
from atoll.node.control.local_client import MAX_LINE, SOCKET_NAME, Answer, socket_path

_TIMEOUT = timedelta(seconds=5)

Command = Callable[[dict[str, Any]], Awaitable[Answer]]


class LocalApi:
    """Serves named commands on the socket."""

    def __init__(self, data_dir: Path, commands: dict[str, Command]) -> None:
        self._data_dir = data_dir
        self._commands = commands
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. A stale socket of a dead daemon is replaced (the data directory's lock is ours)."""
        with socket_path(self._data_dir) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener = socket.socket(socket.AF_UNIX)
            mask = os.umask(0o177)  # nothing else may run meanwhile, so nothing is awaited
            try:
                listener.bind(path)
            except OSError:
                listener.close()
                raise
            finally:
                os.umask(mask)
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_LINE)

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(FileNotFoundError):
            (self._data_dir / SOCKET_NAME).unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT.total_seconds()):
                line = await reader.readline()
            writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ValueError, ConnectionError):  # silent, endless, or gone
            return
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = _parse(line)
            command = self._commands.get(request["command"])
            if command is None:
                raise UsageError("the daemon does not know that command")
            try:
                return {"ok": await command(request)}
            except (ValueError, TypeError, OverflowError, LookupError) as error:
                raise UsageError(f"the daemon cannot use what came with that command: {error}") from error
        except AtollError as error:
            return {"error": {"reason": error.reason, "message": str(error), "remedy": error.remedy}}


def _parse(line: bytes) -> dict[str, Any]:
    """A request with the name of a command. Raises `UsageError`."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError("a request to the daemon is one JSON object on a line") from error
    if not isinstance(request, dict) or not isinstance(request.get("command"), str):
        raise UsageError("a request to the daemon names a command")
    return request
