"""`/atoll/hello/1`: two peers show one another their membership. The only handler open to strangers.

The dialler sends one frame with its `Hello`, the acceptor answers with its own, or with a refusal that says why.
At most 4 KiB each way, five seconds in all. Whoever passes stands in the gate's table on both sides. Strangers
cost nothing to invent, so the number served at once and per second is bounded for all of them together.

Members hear of one another at the same moment, from a plan, and two that dial each other at once from the ports that
they listen on make one TCP connection with two initiators, whose handshake fails; libp2p then refuses to dial for five
seconds and more. So the one with the higher peer id waits a moment to be dialled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core.clock import Clock
from atoll.core.errors import FrameInvalid
from atoll.core.frames import Frame, FrameKind
from atoll.node.wire.gate import Gate
from atoll.node.wire.refusals import run_handler
from atoll.node.wire.streams import SocketStream
from atoll.node.wire.traffic import Traffic
from atoll.node.wire.transport import Stream
from atoll.v1 import dataplane_pb2 as wire

PROTOCOL = "/atoll/hello/1"
MAX_HELLO_BYTES = 4096
HELLO_TIMEOUT = timedelta(seconds=5)
MAX_AT_ONCE = 32
MAX_AT_ONCE_PER_PEER = 2
HELLOS_PER_SECOND = 50.0
BURST = 100.0
DIALLED_FIRST_WAIT = timedelta(seconds=1)  # for the other to dial us: a few round trips

OpenSocket = Callable[[str, str, timedelta], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class HelloLimiter:
    """How many hellos are served: so many at once, so many per second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._tokens = BURST
        self._filled = clock.monotonic()

    def enter(self, peer_id: str, known: bool) -> bool:
        """Whether this hello may be served; if so, `leave` must follow. Strangers cannot crowd out the `known`."""
        now = self._clock.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * HELLOS_PER_SECOND)
        self._filled = now
        crowded = not known and (self._running.total() >= MAX_AT_ONCE or self._tokens < 1)
        if crowded or self._running[peer_id] >= MAX_AT_ONCE_PER_PEER:
            return False
        self._tokens -= 0 if known else 1
        self._running[peer_id] += 1
        return True

    def leave(self, peer_id: str) -> None:
        self._running[peer_id] -= 1
        self._running += Counter()  # drops what is not positive


class Introductions:
    """Says hello to those we dial, once for all who wait, and answers those who dial us."""

    def __init__(self, gate: Gate, open_socket: OpenSocket, traffic: Traffic, clock: Clock) -> None:
        self.crashes = 0  # answers that raised something else than an `AtollError`
        self._gate = gate
        self._open_socket = open_socket
        self._traffic = traffic
        self._limit = HelloLimiter(clock)
        self._saying: dict[str, asyncio.Task[None]] = {}
        self._awaited: dict[str, asyncio.Event] = {}  # peers that may dial us first

    async def ensure_admitted(self, peer_id: str) -> None:
        """Say hello unless the peer stands in the table, or soon does. Raises `Unreachable`, `Rejected`."""
        if not self._gate.is_admitted(peer_id) and peer_id < self._gate.own_peer_id and peer_id not in self._saying:
            await self._wait_to_be_dialled(peer_id)
        if not self._gate.is_admitted(peer_id):
            await self.say_hello(peer_id)

    async def say_hello(self, peer_id: str) -> None:
        """Say hello now. Callers at the same time share one conversation."""
        task = self._saying.get(peer_id)
        if task is None:
            task = self._saying[peer_id] = asyncio.create_task(self._say_hello(peer_id))
            task.add_done_callback(lambda done: self._said(peer_id, done))
        await asyncio.shield(task)

    async def answer(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one hello; a stranger beyond the limits is cut off without a word."""
        if not self._limit.enter(peer_id, self._gate.is_admitted(peer_id)):
            writer.transport.abort()
            return
        try:
            stream = self._stream(peer_id, reader, writer)
            async with asyncio.timeout(HELLO_TIMEOUT.total_seconds()):
                await run_handler(PROTOCOL, stream, self._answer, self._count_crash)
        except TimeoutError:
            writer.transport.abort()
        finally:
            self._limit.leave(peer_id)

    async def close(self) -> None:
        """Give up every hello that is under way."""
        tasks = tuple(self._saying.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _say_hello(self, peer_id: str) -> None:
        reader, writer = await self._open_socket(peer_id, PROTOCOL, HELLO_TIMEOUT)
        stream = self._stream(peer_id, reader, writer)
        try:
            await stream.send(FrameKind.MESSAGE, self._gate.hello().SerializeToString())
            self._gate.admit(peer_id, _parse_hello(await stream.receive(HELLO_TIMEOUT)))
        finally:
            await stream.close()

    async def _wait_to_be_dialled(self, peer_id: str) -> None:
        """Wait until the peer said hello to us, but not for long."""
        event = self._awaited.setdefault(peer_id, asyncio.Event())
        try:
            async with asyncio.timeout(DIALLED_FIRST_WAIT.total_seconds()):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            if self._awaited.get(peer_id) is event:
                del self._awaited[peer_id]

    async def _answer(self, stream: Stream) -> None:
        self._gate.admit(stream.peer_id, _parse_hello(await stream.receive(HELLO_TIMEOUT)))
        if stream.peer_id in self._awaited:
            self._awaited[stream.peer_id].set()
        await stream.send(FrameKind.MESSAGE, self._gate.hello().SerializeToString())

    def _stream(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> SocketStream:
        return SocketStream(
            peer_id,
            PROTOCOL,
            reader,
            writer,
            require_member=lambda: None,
            traffic=self._traffic,
            max_frame_bytes=MAX_HELLO_BYTES,
        )

    def _count_crash(self) -> None:
        self.crashes += 1

    def _said(self, peer_id: str, task: asyncio.Task[None]) -> None:
        del self._saying[peer_id]
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits any more


def _parse_hello(frame: Frame) -> wire.Hello:
    try:
        return wire.Hello.FromString(frame.header)
    except DecodeError as error:
        raise FrameInvalid("a hello does not parse") from error
