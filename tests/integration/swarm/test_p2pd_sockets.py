"""Borrowed sockets of a child: their TCP_INFO and pacing rate are accessible, and no copy keeps them open."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from support.eventually import eventually

from atoll.node.direct import tcp
from atoll.node.swarm import p2pd_sockets
from atoll.node.swarm.p2pd_sockets import BorrowedSocket, P2pdSockets

pytestmark = pytest.mark.skipif(not tcp.PACING_SUPPORTED, reason="only Linux lends sockets")

SECONDS = 60
PACE = 123_456
LARGE = 16 * 1024 * 1024  # more than kernels hold
CHILD = """
import os, socket, sys, threading
connections = []
for line in sys.stdin:
    what, *rest = line.split()
    if what == "dial":
        connections.append(socket.create_connection(("127.0.0.1", int(rest[0]))))
    if what == "pace":
        print(connections[0].getsockopt(socket.SOL_SOCKET, 47))
    if what == "send":
        threading.Thread(target=connections[0].sendall, args=(bytes(int(rest[0])),), daemon=True).start()
    if what == "pipe":
        number = connections[0].fileno()
        connections.pop(0).close()
        pipe = os.pipe()
        assert number in pipe
    if what == "close":
        connections.pop(0).close()
    print("done", flush=True)
"""


class Child:
    """A stand-in for p2pd that dials, closes, and reports its pacing rate."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def does(self, order: str) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        said: list[str] = []
        while (line := self._process.stdout.readline()) != "done\n":
            assert line, "the child died"
            said.append(line.strip())
        return said


@contextmanager
def child() -> Iterator[Child]:
    command = [sys.executable, "-I", "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Child(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(SECONDS)


class Watching:
    """A pacer's list of connections."""

    def __init__(self) -> None:
        self.watched: list[Any] = []
        self.changed = asyncio.Event()

    def add(self, connection: Any) -> None:
        self.watched.append(connection)

    def remove(self, connection: Any) -> None:
        self.watched.remove(connection)

    def wake(self) -> None:
        self.changed.set()

    async def until_looked(self, sockets: P2pdSockets) -> None:
        self.changed.clear()
        sockets.wake()
        async with asyncio.timeout(SECONDS):
            await self.changed.wait()

    async def until_watched(self, sockets: P2pdSockets, before: Any = None) -> list[Any]:
        """Wait for other connections than that; the child's bytes may arrive after the first scan."""
        async with asyncio.timeout(SECONDS):
            while not self.watched or before in self.watched:
                await self.until_looked(sockets)
        return self.watched


def watched(dialler: Child, *, loopback: bool = True) -> tuple[Watching, P2pdSockets]:
    pacer = Watching()
    return pacer, P2pdSockets(dialler.pid, pacer, loopback=loopback)  # type: ignore[arg-type]


class Conversation:
    """A connection from the child, on which it sends more than this process reads."""

    def __init__(self, dialler: Child, size: int = LARGE) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(SECONDS)
        self.address = f"dial {self._listening.getsockname()[1]}"
        dialler.does(self.address)
        self._accepted, _ = self._listening.accept()
        self._accepted.settimeout(SECONDS)
        self._left = size
        dialler.does(f"send {size}")

    def take_all(self) -> None:
        while self._left:
            self._left -= len(self._accepted.recv(1 << 20))

    def has_ended(self) -> bool:
        return self._accepted.recv(1) == b""

    def close(self) -> None:
        self._accepted.close()
        self._listening.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pd_sockets, "SCAN_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
async def test_a_child_s_connections_are_paced_and_close_when_it_closes_them() -> None:
    with child() as dialler, closing(Conversation(dialler)) as talk:
        pacer, sockets = watched(dialler)
        (borrowed,) = await pacer.until_watched(sockets)
        assert borrowed.peer_id == "127.0.0.1"
        await eventually(lambda: (figures := tcp.info(borrowed.sock)) and figures.unsent_bytes > 0)
        tcp.set_pacing_rate(borrowed.sock, PACE)
        assert dialler.does("pace") == [str(PACE)]
        tcp.set_pacing_rate(borrowed.sock, float("inf"))
        talk.take_all()
        dialler.does("close")
        assert talk.has_ended()  # else the copy keeps it open
        assert tcp.info(borrowed.sock) is None
        sockets.wake()
        await eventually(lambda: not pacer.watched)
        await sockets.close()


@pytest.mark.usefixtures("quick")
async def test_a_descriptor_that_serves_another_connection_now_is_left_alone() -> None:
    with child() as dialler, closing(Conversation(dialler)) as talk:
        pacer, sockets = watched(dialler)
        (borrowed,) = await pacer.until_watched(sockets)
        await sockets.close()
        assert not pacer.watched
        borrowing = BorrowedSocket(os.pidfd_open(dialler.pid), borrowed._descriptor, "127.0.0.1")
        talk.take_all()
        dialler.does("close")
        dialler.does(talk.address)  # on the same descriptor
        tcp.set_pacing_rate(borrowing.sock, PACE)
        assert dialler.does("pace") != [str(PACE)]
        assert tcp.info(borrowing.sock) is None
        os.close(borrowing._process)


@pytest.mark.usefixtures("quick")
async def test_a_reused_descriptor_is_a_new_connection() -> None:
    """p2pd dials from its listening port: even both ends of it may have the same addresses."""
    with child() as dialler, closing(Conversation(dialler)) as talk:
        pacer, sockets = watched(dialler)
        (before,) = await pacer.until_watched(sockets)
        talk.take_all()
        dialler.does("close")
        with closing(Conversation(dialler)):  # on the same descriptor
            (now,) = await pacer.until_watched(sockets, before)
            assert tcp.info(now.sock) is not None
        await sockets.close()


@pytest.mark.usefixtures("quick")
async def test_a_descriptor_that_is_no_longer_a_socket_is_closed() -> None:
    with child() as dialler, closing(Conversation(dialler)) as talk:
        pacer, sockets = watched(dialler)
        (borrowed,) = await pacer.until_watched(sockets)
        talk.take_all()
        dialler.does("pipe")
        before = len(os.listdir("/proc/self/fd"))
        assert [tcp.info(borrowed.sock) for _ in range(20)] == [None] * 20
        assert len(os.listdir("/proc/self/fd")) == before
        await sockets.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("size", "loopback"), [(1000, True), (LARGE, False)], ids=["little", "within this machine"])
async def test_little_and_local_connections_are_not_paced(size: int, loopback: bool) -> None:
    with child() as dialler, closing(Conversation(dialler, size)) as talk:
        pacer, sockets = watched(dialler, loopback=loopback)
        for _ in range(3):
            await pacer.until_looked(sockets)
            assert not pacer.watched
        talk.take_all()
        await sockets.close()


async def test_without_permission_of_the_kernel_p2pd_is_not_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    def refuses(process: int, descriptor: int) -> int:
        asked.set()
        raise PermissionError("ptrace is not allowed here")

    monkeypatch.setattr(p2pd_sockets, "_pidfd_getfd", refuses)
    with child() as dialler, socket.create_server(("127.0.0.1", 0)) as listening:
        dialler.does(f"dial {listening.getsockname()[1]}")
        pacer, sockets = watched(dialler)
        sockets.wake()
        async with asyncio.timeout(SECONDS):
            await asked.wait()
        assert not pacer.watched
        await sockets.close()


async def test_an_ended_process_has_no_sockets_to_borrow() -> None:
    with child() as dialler:
        pass
    pacer, sockets = watched(dialler)
    sockets.wake()
    await asyncio.sleep(0)
    await sockets.close()
    assert not pacer.watched
    with pytest.raises(OSError, match="descriptor"):
        BorrowedSocket(-1, 0, "nobody")
