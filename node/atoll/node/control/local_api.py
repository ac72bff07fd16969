"""Local API: the daemon's side of the socket for `atoll status`, `pause`, `resume`, `set`, `finish` and `leave`.

A request and its answer are each one line with a JSON object, over a Unix socket of mode 0600 in the data directory.
Only the directory's owner can connect, so there is no further authentication. Nothing here imports torch.
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
    """Serves commands by name on the socket."""

    def __init__(self, data_dir: Path, commands: dict[str, Command]) -> None:
        self._data_dir = data_dir
        self._commands = commands
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Replaces the socket of a dead daemon: the caller holds the data directory's lock."""
        with socket_path(self._data_dir) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener = socket.socket(socket.AF_UNIX)
            mask = os.umask(0o177)  # process-wide: await nothing until it is restored
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
        except (
            TimeoutError,
            ValueError,
            ConnectionError,
        ):  # no request in time, a line that is too long, or a closed connection
            return
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = _parse(line)
            command = self._commands.get(request["command"])
            if command is None:
                raise UsageError(
                    f"the daemon has no command {request['command'][:40]!r}", "restart the daemon after an upgrade"
                )
            try:
                return {"ok": await command(request)}
            except (ValueError, TypeError, OverflowError, LookupError) as error:
                raise UsageError(f"invalid arguments for {request['command']!r}: {error}") from error
        except AtollError as error:
            return {"error": {"reason": error.reason, "message": str(error), "remedy": error.remedy}}


def _parse(line: bytes) -> dict[str, Any]:
    """Parse a request and require the name of a command. Raises `UsageError`."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError("a request to the daemon must be one line with a JSON object") from error
    if not isinstance(request, dict) or not isinstance(request.get("command"), str):
        raise UsageError('a request to the daemon must have the key "command" with a text')
    return request
