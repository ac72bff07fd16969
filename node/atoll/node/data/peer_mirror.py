"""The other members of the run as a mirror, for a trainer process: it asks its daemon, which asks them.

`peer_socket` is the daemon's side. The daemon verifies what members send; the fetcher does so again. Closed connections
are opened again, so that daemon and trainer may start in any order.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.node.data.card import MAX_CARD_BYTES, MAX_TOKENIZER_BYTES
from atoll.node.data.mirrors import BlockAbsent, Cancelled, Kind, MirrorFailed
from atoll.node.data.peer_socket import (
    ABSENT,
    ANSWER_START,
    GIVEN,
    MAX_REQUEST_BYTES,
    MAX_SENTENCE_CHARACTERS,
    REQUEST_LENGTH,
)
from atoll.node.system.socket_paths import SocketDirectory

ANSWER_SECONDS = 110.0  # shorter than a fetcher's own limit
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.2  # between two looks at `cancelled`
_READ_BYTES = 1 << 18
_MAX_IDLE = 16


class PeerMirror:
    """The run's members. Methods may be called from several threads at once."""

    name = "other members"
    kind: Kind = "members"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._closed = False

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        if start == stop:
            return b""
        data = self._ask({"path": path, "start": start, "stop": stop}, stop - start, cancelled)
        if len(data) != stop - start:
            raise MirrorFailed(f"{self.name} gave {len(data)} bytes of {path} instead of {stop - start}")
        return data

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        most = min(at_most, max(MAX_CARD_BYTES, MAX_TOKENIZER_BYTES))
        return self._ask({"path": path, "at_most": most}, most, cancelled)

    def pieces(self, path: str, at_most: int, cancelled: Cancelled) -> Iterator[bytes]:
        yield self.read_whole(path, at_most, cancelled)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._busy:
                _hang_up(connection)
            while self._idle:
                self._idle.pop().close()

    def _ask(self, request: dict[str, object], at_most: int, cancelled: Cancelled) -> bytes:
        line = json.dumps(request).encode()
        if len(line) > MAX_REQUEST_BYTES:
            raise MirrorFailed("a path is too long")
        gives_up_at = time.monotonic() + ANSWER_SECONDS
        connection, reused = self._connection()
        try:
            try:
                kind, body = self._exchange(connection, line, at_most, cancelled, gives_up_at)
            except ConnectionError:
                if not reused:
                    raise
                self._drop(connection)  # it was closed while it was idle
                connection = self._connect()
                kind, body = self._exchange(connection, line, at_most, cancelled, gives_up_at)
        except OSError as error:
            self._drop(connection)
            raise MirrorFailed(f"the daemon does not answer: {error.strerror or error}") from error
        except BaseException:
            self._drop(connection)
            raise
        self._put_back(connection)
        if kind == GIVEN:
            return body
        sentence = body.decode(errors="replace")
        raise BlockAbsent(sentence) if kind == ABSENT else MirrorFailed(sentence)

    def _exchange(
        self, connection: socket.socket, line: bytes, at_most: int, cancelled: Cancelled, gives_up_at: float
    ) -> tuple[int, bytes]:
        connection.sendall(REQUEST_LENGTH.pack(len(line)) + line)
        kind, size = ANSWER_START.unpack(_receive(connection, ANSWER_START.size, cancelled, gives_up_at))
        if size > (at_most if kind == GIVEN else 4 * MAX_SENTENCE_CHARACTERS):
            raise MirrorFailed(f"the daemon announced {size} bytes instead of {at_most}")
        return kind, _receive(connection, size, cancelled, gives_up_at)

    def _connection(self) -> tuple[socket.socket, bool]:
        """Return a connection, and whether it was used before."""
        with self._lock:
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection, True
        return self._connect(), False

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_CONNECT_SECONDS)
        try:
            directory = SocketDirectory.open(self._path.parent, self._path.name)
            try:
                connection.connect(str(directory.path / self._path.name))
            finally:
                directory.close()
        except (OSError, AtollError) as error:
            connection.close()
            raise MirrorFailed(f"the daemon does not answer: {error}") from error
        connection.settimeout(_POLL_SECONDS)
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise MirrorFailed("the corpus is closed")

    def _put_back(self, connection: socket.socket) -> None:
        with self._lock:
            self._busy.discard(connection)
            if not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


def _receive(connection: socket.socket, size: int, cancelled: Cancelled, gives_up_at: float) -> bytes:
    """Read exactly `size` bytes. Raises `MirrorFailed`, `ConnectionError`."""
    data = bytearray()
    while len(data) < size:
        if cancelled():
            raise MirrorFailed("other members were too slow")
        if time.monotonic() >= gives_up_at:
            raise MirrorFailed(f"the daemon did not answer within {ANSWER_SECONDS:.0f} s")
        try:
            piece = connection.recv(min(_READ_BYTES, size - len(data)))
        except TimeoutError:
            continue
        if not piece:
            raise ConnectionResetError("the daemon closed the connection")
        data += piece
    return bytes(data)


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
