"""Whatever comes over the node's own sockets, from its owner's programs or its trainer: an answer, or our own error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mutation import CASES, Mutator, cases, seeds

from atoll.core.errors import AtollError
from atoll.node.control import local_client
from atoll.node.control.local_api import LocalApi
from atoll.node.trainer import messages as ms

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["pause", "generate", "status", "Infinity", "x" * 5_000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
BOMBS = [b"", b"\n", b"[" * 200_000, b'{"a":' * 50_000, b"\xff\xfe", b'{"command": 1e999}', b"1" * 10_000, b"x" * 2**21]
bombs = st.integers(0, len(BOMBS) - 1).map(BOMBS.__getitem__)
requests = st.one_of(
    JSON,
    st.builds(lambda command: {"command": command}, JSON),
    st.builds(
        lambda command, seconds, tokens: {"command": command, "seconds": seconds, "prompt": tokens, "tokens": tokens},
        st.sampled_from(["pause", "generate"]),
        JSON,
        JSON,
    ),
)
lines = st.one_of(requests.map(lambda value: json.dumps(value).encode()), bombs, st.binary(max_size=50))


async def _status(_: dict[str, Any]) -> dict[str, Any]:
    return {"well": True}


async def _pause(request: dict[str, Any]) -> dict[str, Any]:
    seconds = float(request.get("seconds") or 0)
    return {"until_unix": 1.0 + seconds if math.isfinite(seconds) else None}


async def _generate(request: dict[str, Any]) -> dict[str, Any]:
    return {"text": str(request["prompt"])[: int(request.get("tokens", 200))]}


class Daemon:
    """The local API in a loop of its own, as a client sees it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.crashes: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.crashes.append(context))
        self._api = LocalApi(directory, {"status": _status, "pause": _pause, "generate": _generate})
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Daemon:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._api.start(), self._loop).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._api.close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def say(self, data: bytes) -> bytes:
        """Send it and hang up on that side; what comes back until the daemon hangs up."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self.directory / local_client.SOCKET_NAME))
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                with connection.makefile("rb") as answer:
                    return answer.read()
            except (BrokenPipeError, ConnectionResetError):
                return b""  # it did not want to hear all of that


@pytest.mark.parametrize("examples", CASES)
def test_whatever_is_asked_of_the_daemon(examples: int) -> None:
    with tempfile.TemporaryDirectory() as directory, Daemon(Path(directory)) as daemon:

        @cases(examples)
        @given(lines)
        def ask(line: bytes) -> None:
            reply = daemon.say(line + b"\n")
            if reply:
                assert set(json.loads(reply)) <= {"ok", "error"}
            assert daemon.crashes == []
            assert local_client.call(daemon.directory, "status", timedelta(seconds=60)) == {"well": True}

        ask()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_the_daemon_answers(examples: int) -> None:
    """The asking side too ends with an error that a person can read."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / local_client.SOCKET_NAME
        said: list[bytes] = []
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()

            def serve() -> None:
                while True:
                    connection, _ = server.accept()
                    with connection, connection.makefile("rb") as line:
                        line.readline()
                        if not said:
                            return
                        connection.sendall(said.pop())

            thread = threading.Thread(target=serve)
            thread.start()

            @cases(examples)
            @given(st.one_of(lines, requests.map(lambda v: json.dumps({"ok": v}).encode()), problems))
            def answer(line: bytes) -> None:
                said.append(line[: 2**16] + b"\n")
                with contextlib.suppress(AtollError):
                    assert isinstance(local_client.call(Path(directory), "status"), dict)

            try:
                answer()
            finally:
                said.clear()
                with socket.socket(socket.AF_UNIX) as last:
                    last.connect(str(path))
                    last.sendall(b"\n")
                    thread.join(60)


problems = JSON.map(lambda value: json.dumps({"error": {"reason": value, "message": "m", "remedy": value}}).encode())

MESSAGES: list[ms.Message] = [
    ms.TrainerConfig("version = 1\n", None),
    ms.TrainerStatus(),
    ms.Load(((0, 5), (9, 12)), 77),
    ms.Apply(((0, 5),), 7, (0, 9)),
    ms.Generate("p", 3, 1),
    ms.Snapshot(1, 2, 3, 4),
    ms.Loss(1.5),
    ms.Refused("CorpusError", "is empty", "give more"),
    ms.Done(),
]
envelopes = st.one_of(
    JSON.map(lambda value: json.dumps(value).encode()),
    st.builds(
        lambda number, kind, fields: json.dumps({"number": number, "kind": kind, "fields": fields}).encode(),
        JSON,
        st.sampled_from([type(message).__name__ for message in MESSAGES]) | JSON,
        JSON,
    ),
    st.builds(
        lambda message, key, value: _changed(message, key, value),
        st.sampled_from(MESSAGES),
        st.integers(0, 9),
        JSON,
    ),
    st.builds(
        lambda message, seed: Mutator(seed).bytes(ms.Envelope(3, message).line()), st.sampled_from(MESSAGES), seeds
    ),
    bombs,
)


def _changed(message: ms.Message, key: int, value: Any) -> bytes:
    raw = json.loads(ms.Envelope(3, message).line())
    names = sorted(raw["fields"]) or ["none"]
    raw["fields"][names[key % len(names)]] = value
    return json.dumps(raw).encode()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_line_daemon_and_trainer_read(examples: int) -> None:
    """A line is a message with the fields of its class, or a `ValueError`, which ends the trainer and nothing else."""

    @cases(examples)
    @given(envelopes)
    def read(line: bytes) -> None:
        try:
            envelope = ms.Envelope.parse(line)
        except ValueError:
            return
        assert ms.Envelope.parse(envelope.line()) == envelope or b"NaN" in line

    read()
