"""Hello (`/atoll/hello/1`): two peers exchange membership certificates. The only handler open to non-members.

The dialler sends one frame with its `Hello`. The acceptor answers with its own, or with a refusal that says why. Each
frame has at most 4 KiB, and the whole takes at most five seconds. After a valid exchange the gates of both sides have
admitted the other peer. An attacker can create any number of peer ids, so the number of hellos at once and per second
is bounded for all unauthenticated peers together (`hello_places.py`).

Members learn of each other from the same plan at the same moment. If two dial each other at once from their listening
ports, TCP makes one connection with two initiators and the handshake fails; libp2p then refuses to dial for five
seconds or more. So the member with the higher peer id first waits a second to be dialled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial

from google.protobuf.message import DecodeError

from atoll.core.clock import Clock
from atoll.core.errors import FrameInvalid
from atoll.core.frames import Frame, FrameKind
from atoll.node.swarm.hello_places import HelloPlaces, Place
from atoll.node.wire.gate import Gate
from atoll.node.wire.refusals import run_handler
from atoll.node.wire.streams import SocketStream
from atoll.node.wire.traffic import Traffic
from atoll.node.wire.transport import Stream
from atoll.v1 import dataplane_pb2 as dp

PROTOCOL = "/atoll/hello/1"
MAX_HELLO_BYTES = 4096
HELLO_TIMEOUT = timedelta(seconds=5)
DIALLED_FIRST_WAIT = timedelta(seconds=1)  # time for the peer to dial this node: a few round trips

OpenSocket = Callable[[str, str, timedelta], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Introductions:
    """Says hello to peers that this node dials, once for all concurrent callers, and answers incoming hellos."""

    def __init__(
        self,
        gate: Gate,
        open_socket: OpenSocket,
        traffic: Traffic,
        clock: Clock,
        is_on_record: Callable[[str], bool] = lambda _peer_id: False,
    ) -> None:
        """`is_on_record` returns whether a verified record names this peer as a member."""
        self.crashes = 0  # answers that raised another exception than `AtollError`
        self._gate = gate
        self._open_socket = open_socket
        self._is_on_record = is_on_record
        self._traffic = traffic
        self._places = HelloPlaces(clock)
        self._saying: dict[str, asyncio.Task[None]] = {}
        self._awaited: dict[str, asyncio.Event] = {}  # peers that may dial us first

    async def ensure_admitted(self, peer_id: str) -> None:
        """Say hello, unless the peer is admitted or will dial this node shortly. Raises `Unreachable`, `Rejected`."""
        if not self._gate.is_admitted(peer_id) and peer_id < self._gate.own_peer_id and peer_id not in self._saying:
            await self._wait_to_be_dialled(peer_id)
        if not self._gate.is_admitted(peer_id):
            await self.say_hello(peer_id)

    async def say_hello(self, peer_id: str) -> None:
        """Say hello now. Concurrent callers share one exchange."""
        task = self._saying.get(peer_id)
        if task is None:
            task = self._saying[peer_id] = asyncio.create_task(self._say_hello(peer_id))
            task.add_done_callback(lambda done: self._said(peer_id, done))
        await asyncio.shield(task)

    async def answer(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: bytes = b""
    ) -> None:
        """Serve one hello; beyond the limits, abort the stream without an answer.

        `address` is the peer's binary multiaddr, as p2pd names it.
        """
        known = self._gate.is_admitted(peer_id) or self._is_on_record(peer_id)
        place = self._places.take(peer_id, address, known=known, abort=writer.transport.abort)
        if place is None:
            writer.transport.abort()
            return
        try:
            stream = self._stream(peer_id, reader, writer)
            async with asyncio.timeout(HELLO_TIMEOUT.total_seconds()):
                await run_handler(PROTOCOL, stream, partial(self._answer, place), self._count_crash)
        except TimeoutError:
            writer.transport.abort()
        finally:
            self._places.leave(place)

    async def close(self) -> None:
        """Cancel all outgoing hellos."""
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
        """Wait until the peer has said hello to this node, at most `DIALLED_FIRST_WAIT`."""
        event = self._awaited.setdefault(peer_id, asyncio.Event())
        try:
            async with asyncio.timeout(DIALLED_FIRST_WAIT.total_seconds()):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            if self._awaited.get(peer_id) is event:
                del self._awaited[peer_id]

    async def _answer(self, place: Place, stream: Stream) -> None:
        frame = await stream.receive(HELLO_TIMEOUT)
        if not self._places.may_verify(place):
            place.abort()
            return
        self._gate.admit(stream.peer_id, _parse_hello(frame))
        self._places.admitted(place)
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
            task.exception()  # mark as retrieved: all callers may have been cancelled


def _parse_hello(frame: Frame) -> dp.Hello:
    try:
        return dp.Hello.FromString(frame.header)
    except DecodeError as error:
        raise FrameInvalid("a hello does not parse") from error
