"""The network within one process: what `transport.Network` promises, without sockets.

For unit tests and for deterministic simulations of the very modules that ship. A `MemoryHub` joins any number
of peers; a fault hook sees every frame and may delay it (by awaiting), replace it (a lying peer), drop it
(`None`) or damage it (an error that the receiver's `receive` then raises). `cut` takes a peer off the network
the way a dead machine goes: its streams end, and dialling it fails.

    hub = MemoryHub()
    a, b = hub.join("a"), hub.join("b")
    b.handle("/echo/1", echo)
    stream = await a.open("b", "/echo/1", timedelta(seconds=1))
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from atoll.core.errors import AtollError, DeadlineExceeded, Unreachable
from atoll.core.frames import PREFIX, Buffer, Frame, FrameKind, pack_prefix
from atoll.node.wire.refusals import raise_if_refusal, run_handler
from atoll.node.wire.transport import Handler

QUEUE_FRAMES = 8  # like a socket's buffer: a sender waits for a receiver that falls behind


@dataclass(frozen=True, slots=True)
class FrameInTransit:
    """One frame on its way, as a fault hook sees it."""

    sender: str
    receiver: str
    protocol: str
    frame: Frame


Fault = Callable[[FrameInTransit], Awaitable[Frame | AtollError | None]]


async def no_fault(passage: FrameInTransit) -> Frame | AtollError | None:
    """Deliver everything unchanged."""
    return passage.frame


class _Pipe:
    """One direction of a stream: a bounded queue with an end."""

    def __init__(self) -> None:
        self._items: deque[Frame | AtollError] = deque()
        self._changed = asyncio.Condition()
        self._ended = False

    async def put(self, item: Frame | AtollError) -> bool:
        """Wait for room; False if the pipe ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or len(self._items) < QUEUE_FRAMES)
            if self._ended:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    async def get(self) -> Frame | AtollError | None:
        """The next item; None when the pipe ended and everything sent before was taken."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or bool(self._items))
            self._changed.notify_all()
            return self._items.popleft() if self._items else None

    async def end(self, *, discard: bool = False) -> None:
        async with self._changed:
            self._ended = True
            if discard:
                self._items.clear()
            self._changed.notify_all()


class MemoryStream:
    """One end of a conversation between two joined peers."""

    def __init__(self, passage: tuple[str, str, str], outgoing: _Pipe, incoming: _Pipe, fault: Fault) -> None:
        self._own_id, self._peer_id, self._protocol = passage
        self._outgoing = outgoing
        self._incoming = incoming
        self._fault = fault
        self._sent = 0

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def bytes_sent(self) -> int:
        return self._sent

    @property
    def has_own_connection(self) -> bool:
        return True

    async def send(self, kind: FrameKind, header: Buffer, body: Buffer = b"") -> None:
        pack_prefix(kind, header, body)  # refuses what is over the cap, as a real stream does
        frame = Frame(kind, bytes(header), bytes(body))  # copies: a sender may reuse its buffer
        arrival = await self._fault(FrameInTransit(self._own_id, self._peer_id, self._protocol, frame))
        if arrival is not None and not await self._outgoing.put(arrival):
            raise self._ended()
        self._sent += _wire_bytes(frame)

    async def receive(self, timeout: timedelta) -> Frame:
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                arrival = await self._incoming.get()
        except TimeoutError as error:
            raise DeadlineExceeded(f"peer {self._peer_id} sent nothing within {timeout}") from error
        if arrival is None:
            raise self._ended()
        if isinstance(arrival, AtollError):
            raise arrival
        return await raise_if_refusal(self, arrival)

    async def close(self) -> None:
        await self._outgoing.end()
        await self._incoming.end(discard=True)

    async def cut(self) -> None:
        """End the stream and lose what was under way."""
        await self._outgoing.end(discard=True)
        await self._incoming.end(discard=True)

    def _ended(self) -> Unreachable:
        return Unreachable(f"peer {self._peer_id} ended the stream {self._protocol}")


class MemoryNetwork:
    """One peer's view of a hub; implements `transport.Network`."""

    def __init__(self, hub: MemoryHub, peer_id: str) -> None:
        self._hub = hub
        self._peer_id = peer_id
        self.handlers: dict[str, Handler] = {}
        self.streams: list[MemoryStream] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.crashes = 0  # handlers that raised something else than an `AtollError`

    @property
    def peer_id(self) -> str:
        return self._peer_id

    def handle(self, protocol: str, handler: Handler) -> None:
        self.handlers[protocol] = handler

    async def open(self, peer_id: str, protocol: str, timeout: timedelta) -> MemoryStream:
        return self._hub.connect(self, peer_id, protocol)

    def bytes_per_second_to(self, peer_id: str) -> float:
        return math.inf

    def serve(self, protocol: str, stream: MemoryStream) -> None:
        """Run our handler on the accepting end of a new stream."""
        task = asyncio.create_task(run_handler(protocol, stream, self.handlers[protocol], self._count_crash))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def close(self) -> None:
        """Stop every handler that runs and cut every stream."""
        for task in tuple(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for stream in self.streams:
            await stream.cut()
        self.streams.clear()

    def _count_crash(self) -> None:
        self.crashes += 1


class MemoryHub:
    """Everybody who can reach everybody, until `cut`."""

    def __init__(self, fault: Fault = no_fault) -> None:
        self._fault = fault
        self._peers: dict[str, MemoryNetwork] = {}

    def join(self, peer_id: str) -> MemoryNetwork:
        """A network for `peer_id`; joining again replaces the peer, as a restart does."""
        self._peers[peer_id] = MemoryNetwork(self, peer_id)
        return self._peers[peer_id]

    async def cut(self, peer_id: str) -> None:
        """Take a peer off the network: dialling it fails, its streams end, frames under way are lost."""
        await self._peers.pop(peer_id).close()

    async def close(self) -> None:
        """Cut everybody."""
        for peer_id in tuple(self._peers):
            await self.cut(peer_id)

    def connect(self, dialler: MemoryNetwork, peer_id: str, protocol: str) -> MemoryStream:
        """Both ends of a new stream; the handler of the accepting end starts."""
        acceptor = self._peers.get(peer_id)
        if acceptor is None or self._peers.get(dialler.peer_id) is not dialler:
            raise Unreachable(f"peer {peer_id} does not answer")
        if protocol not in acceptor.handlers:
            raise Unreachable(f"peer {peer_id} does not serve {protocol}")
        there, back = _Pipe(), _Pipe()
        ours = MemoryStream((dialler.peer_id, peer_id, protocol), there, back, self._fault)
        theirs = MemoryStream((peer_id, dialler.peer_id, protocol), back, there, self._fault)
        dialler.streams.append(ours)
        acceptor.streams.append(theirs)
        acceptor.serve(protocol, theirs)
        return ours


def _wire_bytes(frame: Frame) -> int:
    return PREFIX.size + len(frame.header) + len(frame.body)
