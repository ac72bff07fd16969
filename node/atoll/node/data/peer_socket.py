"""The private socket over which trainer processes read the corpus from other members: the daemon's side.

A Unix socket of mode 0600 in the data directory. A connection carries one request at a time:

    request   length (4 bytes, big-endian), JSON: {"path": …, "start": …, "stop": …} or {"path": …, "at_most": …}
    answer    kind (1 byte), length (8 bytes), bytes of the file or a sentence in UTF-8

`peer_mirror` is the other side. A client that hangs up ends its read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, NotFound
from atoll.node.data.block_client import BlockClient
from atoll.node.data.card import MAX_TOKENIZER_BYTES
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.system.socket_paths import SocketDirectory

MAX_REQUEST_BYTES = 512
MAX_SENTENCE_CHARACTERS = 500
REQUEST_LENGTH = struct.Struct(">I")
ANSWER_START = struct.Struct(">BQ")
GIVEN, ABSENT, FAILED = 0, 1, 2  # kinds of answers
IDLE_SECONDS = 600.0
_WRITE_SECONDS = 60.0
_MAX_CONNECTIONS = 64


class PeerSocket:
    """Serves reads of trainer processes. Until `client` is set, every read is answered with "absent"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.client: BlockClient | None = None
        self._server: asyncio.Server | None = None
        self._tasks = BackgroundTasks()
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen. Replaces the socket of a dead daemon: the caller holds the data directory's lock."""
        directory = SocketDirectory.open(self.path.parent, self.path.name)
        listener = socket.socket(socket.AF_UNIX)
        mask = os.umask(0o177)  # process-wide: await nothing until it is restored
        try:
            name = directory.path / self.path.name
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            listener.bind(str(name))
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(mask)
            directory.close()
        self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=1 << 16)

    async def close(self) -> None:
        """Stop listening, end all reads, and remove the socket."""
        if self._server is not None:
            self._server.close()
        await self._tasks.stop()
        for writer in self._connections:  # of tasks that had not begun
            writer.transport.abort()
        self._connections.clear()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        self._tasks.begin(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._connections) <= _MAX_CONNECTIONS:
                while True:
                    async with asyncio.timeout(IDLE_SECONDS):
                        (size,) = REQUEST_LENGTH.unpack(await reader.readexactly(REQUEST_LENGTH.size))
                        if size > MAX_REQUEST_BYTES:
                            return
                        request = await reader.readexactly(size)
                    answer = await _unless_gone(reader, self._answer(request))
                    if answer is None:
                        return
                    writer.write(ANSWER_START.pack(answer[0], len(answer[1])))
                    writer.write(answer[1])
                    async with asyncio.timeout(_WRITE_SECONDS):
                        await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            return
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _answer(self, request: bytes) -> tuple[int, bytes]:
        try:
            wanted = _parse(request)
            if self.client is None:
                raise NotFound("this node has not joined the swarm yet")
            if "at_most" in wanted:
                return GIVEN, await self.client.read_whole(wanted["path"], wanted["at_most"])
            return GIVEN, await self.client.read(wanted["path"], wanted["start"], wanted["stop"])
        except NotFound as error:
            return ABSENT, _sentence(error)
        except (AtollError, ValueError) as error:
            return FAILED, _sentence(error)


async def _unless_gone(reader: asyncio.StreamReader, work: Any) -> tuple[int, bytes] | None:
    """Return the answer. If the client closes the connection or writes before that, cancel the work and return None."""
    answering, gone = asyncio.ensure_future(work), asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else None
    finally:
        for task in (answering, gone):
            task.cancel()
        await asyncio.gather(answering, gone, return_exceptions=True)


def _parse(request: bytes) -> dict[str, Any]:
    """Parse a request. Raises `ValueError`."""
    try:
        wanted = json.loads(request)
    except RecursionError as error:
        raise ValueError("a read of the corpus is not JSON") from error
    if not isinstance(wanted, dict) or not isinstance(wanted.get("path"), str):
        raise ValueError("a read of the corpus needs a path")
    for name in ("at_most",) if "at_most" in wanted else ("start", "stop"):
        number = wanted.get(name)
        if not isinstance(number, int) or not 0 <= number < 1 << 62:
            raise ValueError(f"a read of the corpus needs a number as {name}")
    if "at_most" not in wanted and not 0 < wanted["stop"] - wanted["start"] <= MAX_TOKENIZER_BYTES:
        raise ValueError("a read of the corpus asks for too much")
    return wanted


def _sentence(error: Exception) -> bytes:
    return str(error)[:MAX_SENTENCE_CHARACTERS].encode()
